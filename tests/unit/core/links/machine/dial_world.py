"""Two workers, the connections between them, and everything that may happen next.

The workers do with `PeerConnection` what the runtime's directory does, one event at a
time.  Each connection delivers in order; two connections know nothing of each other.
A world is copied and stepped, so that a test can visit every order of events.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from asyncrpc.core.links.machine.pool import DUPLICATE, PeerConnection, PeerState

INCARNATIONS = {"smaller": 1, "larger": 2}
OTHER = {"smaller": "larger", "larger": "smaller"}
TAKEN = "taken"
PROOF = "proof"
LOST = "lost"


@dataclass
class Side:
    """One worker: its machine, and the task that dials."""

    machine: PeerConnection[str]
    wants: int  # how many calls are still to ask for a connection
    attempt: int | None = None  # of the dial under way
    dialing: str = ""  # its connection, until that is answered or lost
    is_refused: bool = False  # the dial waits for the peer's own
    awaits_proof: bool = False  # likewise, and has taken that
    is_settled: bool = False  # something has become of it

    @property
    def link(self) -> str | None:
        """The connection on which this side may send calls."""
        is_open = self.machine.state is PeerState.OPEN
        return self.machine.connection if is_open else None


@dataclass
class World:
    """Both sides, and what is on its way on each connection.

    Attributes:
        attempts_max: dials in a row before a worker gives up.
        losses: how many connections may still break.
        agreed: the connection on which both have been at the same time.
        used: what each side could send calls on.
        offences: what must not happen and did.
    """

    sides: dict[str, Side]
    attempts_max: int
    losses: int = 0
    broken: str = ""
    queues: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    dialed: int = 0
    ended: frozenset[str] = frozenset()
    agreed: str = ""
    used: dict[str, str | None] = field(default_factory=dict)
    offences: tuple[str, ...] = ()

    @classmethod
    def new(cls, wants: dict[str, int], attempts_max: int, losses: int) -> World:
        """Return two workers that have never met."""
        sides = {
            name: Side(PeerConnection(INCARNATIONS[name]), wants[name])
            for name in INCARNATIONS
        }
        return cls(sides, attempts_max, losses)

    def key(self) -> object:
        """Return what tells this world from others."""
        sides = tuple(
            (
                *(getattr(side.machine, slot) for slot in PeerConnection.__slots__),
                *(side.wants, side.attempt, side.dialing),
                *(side.is_refused, side.awaits_proof, side.is_settled),
            )
            for side in self.sides.values()
        )
        queues = tuple(sorted((at, tuple(q)) for at, q in self.queues.items()))
        fate = (self.broken, self.agreed, self.offences)
        return (sides, queues, self.ended, self.losses, fate)

    def successors(self) -> Iterator[World]:
        """Return every world that one event leads to."""
        for event in self._events():
            world = copy.deepcopy(self)
            event(world)
            world.watch()
            yield world

    def _events(self) -> Iterator[Callable[[World], None]]:
        for name, side in self.sides.items():
            if side.wants and side.attempt is None and not side.link:
                yield partial(World._want, name=name)
            if (side.is_refused or side.awaits_proof) and side.is_settled:
                yield partial(World._go_on, name=name)
            if side.is_refused and not side.is_settled:
                yield partial(World._time_out, name=name)
        for connection, to in self.queues:
            yield partial(World._deliver, connection=connection, to=to)
        if self.losses:
            for connection in sorted(self._connections()):
                yield partial(World._break, connection=connection, keep=False)
                yield partial(World._break, connection=connection, keep=True)

    def _connections(self) -> set[str]:
        under_way = {connection for connection, _ in self.queues}
        held = {side.machine.connection for side in self.sides.values()}
        return (under_way | {held for held in held if held}) - self.ended

    # --- what a worker does ----------------------------------------------------------

    def _want(self, name: str) -> None:
        self.sides[name].wants -= 1
        self._dial(name, 0)

    def _dial(self, name: str, attempt: int) -> None:
        side = self.sides[name]
        side.attempt, side.is_settled = attempt, False
        if not side.machine.want(attempt):
            side.awaits_proof = True
            return
        self.dialed += 1
        side.dialing = f"{name} {self.dialed}"
        self._send(side.dialing, OTHER[name], f"offer {attempt}")

    def _go_on(self, name: str) -> None:
        """Something has become of the peer's connection: perhaps it is gone again."""
        side = self.sides[name]
        side.is_refused = side.awaits_proof = False
        self._again(name)

    def _time_out(self, name: str) -> None:
        """The peer's connection does not come up."""
        self.sides[name].is_refused = False
        self.sides[name].machine.on_dial_failed()
        self._again(name)

    def _again(self, name: str) -> None:
        side = self.sides[name]
        attempt = (side.attempt or 0) + 1
        if side.link is None and attempt < self.attempts_max:
            self._dial(name, attempt)
        else:
            side.attempt = None

    def _on_offer(self, name: str, connection: str, attempt: int) -> None:
        verdict = self.sides[name].machine.on_offer(INCARNATIONS[OTHER[name]], attempt)
        if not verdict.accept:
            self._send(connection, OTHER[name], DUPLICATE)
            return
        self.sides[name].machine.on_open(connection, dialed=False)
        self._send(connection, OTHER[name], TAKEN)
        self._end(verdict.replaced, keep=False)

    def _on_answer(self, name: str, connection: str) -> None:
        side = self.sides[name]
        side.dialing = ""
        verdict = side.machine.on_answer(INCARNATIONS[OTHER[name]])
        if not verdict.accept:
            self._end(connection, keep=False)
            self._again(name)
            return
        side.attempt = None
        side.machine.on_open(connection, dialed=True)
        self._send(connection, OTHER[name], PROOF)
        self._end(verdict.replaced, keep=False)

    # --- what the network does -------------------------------------------------------

    def _send(self, connection: str, to: str, message: str) -> None:
        if connection not in self.ended or message == LOST:
            self.queues.setdefault((connection, to), []).append(message)

    def _deliver(self, connection: str, to: str) -> None:
        queue = self.queues[connection, to]
        message = queue.pop(0)
        if not queue:
            del self.queues[connection, to]
        side = self.sides[to]
        if message == TAKEN:
            self._on_answer(to, connection)
        elif message == PROOF:
            side.is_settled |= side.machine.on_proven(connection)
        elif message == DUPLICATE:
            side.dialing = ""
            if side.machine.connection is None:
                side.is_refused, side.is_settled = True, False
            else:
                self._again(to)
        elif message == LOST:
            self._on_lost(to, connection)
        else:
            self._on_offer(to, connection, int(message.removeprefix("offer ")))

    def _on_lost(self, name: str, connection: str) -> None:
        side = self.sides[name]
        side.is_settled |= side.machine.on_lost(connection)
        if connection == side.dialing:
            side.machine.on_dial_failed()
            side.dialing = ""
            if side.machine.connection is None:
                side.attempt = None
            else:
                self._again(name)

    def _break(self, connection: str, *, keep: bool) -> None:
        self.losses -= 1
        self.broken = connection
        self._end(connection, keep=keep)

    def _end(self, connection: str | None, *, keep: bool) -> None:
        """End a connection; what is on its way may still arrive, or not."""
        if connection is None or connection in self.ended:
            return
        self.ended |= {connection}
        for name in self.sides:
            if not keep:
                self.queues.pop((connection, name), None)
            self._send(connection, name, LOST)

    def watch(self) -> None:
        """Note what each may use and both hold, and whether they ever give it up."""
        for name, side in self.sides.items():
            before = self.used.get(name)
            if before not in (None, side.link) and not self.broken:
                self.offences += (f"{name} gave up {before} for {side.link}",)
            self.used[name] = side.link
        held = {side.machine.connection for side in self.sides.values()}
        if self.agreed and not self.broken and held != {self.agreed}:
            self.offences += (f"{self.agreed} was given up for {held}",)
        if len(held) == 1:
            self.agreed = next(iter(held)) or ""
