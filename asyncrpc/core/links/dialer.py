"""Dials a peer until there is a link to it, or the dial fails.

`machine.dialing` decides; here is one step for each of its states.

A worker dials some peers at a time, and the others wait for their turns.  One that
calls hundreds of peers for the first time, all at once, would begin all of these
handshakes and end none within its time; so would 128 workers of one host.
`machine.dial_window` says how many there may be.  The time of a dial counts from its
turn.

Of the waiting peers, the next one by name after the worker's own has the next turn: if
all workers call all, in whichever order, each is dialed by a few at a time.

A host that is gone answers nothing, which costs nothing either: a dial that has not
connected within `CONNECT_TURN_S` lets the next one begin, and goes on beside it.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from asyncrpc.core.counters import Counters
from asyncrpc.core.identity import WorkerIdentity
from asyncrpc.core.links.connection import Connection
from asyncrpc.core.links.connections import Connections
from asyncrpc.core.links.entry import PeerEntry
from asyncrpc.core.links.link import Link
from asyncrpc.core.links.liveness import Liveness
from asyncrpc.core.links.machine.detector import Evidence
from asyncrpc.core.links.machine.dial_window import DialWindow
from asyncrpc.core.links.machine.dialing import DialAttempts, DialEvent, DialState
from asyncrpc.core.links.machine.pool import DUPLICATE
from asyncrpc.core.links.ports import GroupRecords
from asyncrpc.core.links.routes import Routes
from asyncrpc.core.members import UNKNOWN_INCARNATION, Member
from asyncrpc.core.transport.address import Address
from asyncrpc.core.transport.dial import Dialled
from asyncrpc.core.wire.frames import Hello
from asyncrpc.core.wire.handshake import Role
from asyncrpc.errors import (
    AuthenticationError,
    ConnectError,
    ConnectionLostError,
    Outcome,
    RefusedError,
    TransportError,
    UnansweredError,
    WorkerLostError,
)

if TYPE_CHECKING:
    from asyncrpc.core.links.directory import Directory

CONNECT_TURN_S: Final = 0.5


class DialTurn:
    """The turn of one dial.

    Attributes:
        is_held: whether it has begun, and has not ended.
        is_over: whether it has ended, or is not waited for any more.
    """

    def __init__(self, turns: DialTurns, wakes: asyncio.Event) -> None:
        self._turns = turns
        self._wakes = wakes
        self.is_held = False
        self.is_over = False
        self._began_s = 0.0

    async def begun(self) -> None:
        """Wait until the turn has come, or something else wakes it."""
        await asyncio.sleep(0)  # until all that begin at this moment are here
        self._turns.give()
        if not self.is_held:
            await self._wakes.wait()

    def begin(self) -> None:
        """Begin the dial: its turn has come."""
        self.is_held = True
        self._began_s = asyncio.get_running_loop().time()
        self._wakes.set()

    def answered(self) -> None:
        """The peer has answered."""
        self._turns.on_answered(asyncio.get_running_loop().time() - self._began_s)

    def end(self) -> None:
        """Let the next dial begin, or stop waiting.  Idempotent."""
        self.is_over = True
        if self.is_held:
            self.is_held = False
            self._turns.on_end()

    @contextmanager
    def connecting(self) -> Iterator[None]:
        """End the turn if the block, which connects, takes long."""
        loop = asyncio.get_running_loop()
        ending = loop.call_later(CONNECT_TURN_S, self.end)
        try:
            yield
        finally:
            ending.cancel()


class DialTurns:
    """The turns of one worker's dials."""

    def __init__(self, own_name: str, window: DialWindow) -> None:
        self._own_name = own_name
        self._window = window
        self._numbers = itertools.count()
        self._waiting: list[tuple[bool, str, int, DialTurn]] = []  # a heap

    @contextmanager
    def dial_turn(self, name: str, wakes: asyncio.Event) -> Iterator[DialTurn]:
        """Wait in line until the end of the block, or hold a turn.

        Not an asynchronous generator: the end of a loop closes those under the tasks
        that still use them.
        """
        turn = DialTurn(self, wakes)
        is_before = name < self._own_name
        heapq.heappush(self._waiting, (is_before, name, next(self._numbers), turn))
        try:
            yield turn
        finally:
            turn.end()

    def on_answered(self, took_s: float) -> None:
        """A peer has answered, so many seconds after its turn came."""
        self._window.on_answered(took_s)
        self.give()

    def on_end(self) -> None:
        """A turn has ended."""
        self._window.on_ended()
        self.give()

    def give(self) -> None:
        """Give turns to those who wait, as many as there are."""
        while self._waiting and self._window.may_begin:
            *_, turn = heapq.heappop(self._waiting)
            if not turn.is_over:
                self._window.on_begun()
                turn.begin()


DUPLICATE_WAIT_S: Final = 1.0  # for the connection that won to come up
_OF_EVIDENCE: Final = {
    Evidence.BUSY: DialEvent.BUSY,
    Evidence.TICKING: DialEvent.TICKING,
}


class _NoAnswerError(TimeoutError):
    """A process has accepted the connection, and has not answered in time.

    Attributes:
        pid: of the process that listens, where the kernel states it; else 0.
    """

    def __init__(self, pid: int) -> None:
        super().__init__()
        self.pid = pid


class Dialer:
    """Dials the peers of one worker.

    Attributes:
        ask_to_dial: asks a peer that cannot be dialed to dial this worker.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        counters: Counters,
        routes: Routes,
        handshakes: Connections,
        answers: Directory,
        *,
        processes: Liveness,
    ) -> None:
        """Prepare.

        Args:
            answers: told of what peers answer; has opened the link when it returns.
        """
        self._identity = identity
        self._counters = counters
        self._routes = routes
        self._turns = DialTurns(identity.name, DialWindow())
        self._handshakes = handshakes
        self._answers = answers
        self._processes = processes
        self.ask_to_dial: Callable[[Member], Awaitable[None]] | None = None

    async def dial(self, entry: PeerEntry, group: GroupRecords | None) -> Link:
        """Return the link to a peer, made by this side or by the peer.

        Args:
            group: knows whether the peer is elsewhere now; None: there is no group.
        """
        dial = _Dial(
            entry,
            group,
            self._dial_once,
            self._routes,
            self._turns,
            processes=self._processes,
        )
        return await dial.run()

    async def _dial_once(self, entry: PeerEntry, attempt: int, turn: DialTurn) -> bool:
        """Dial; return whether the connection is open.

        If it is not, the peer's own dial is to survive.
        """
        try:
            return await self._connect(entry, attempt, turn)
        except BaseException as error:
            if isinstance(error, AuthenticationError):
                self._counters.authentications_failed += 1
            entry.machine.on_dial_failed()
            raise

    async def _connect(self, entry: PeerEntry, attempt: int, turn: DialTurn) -> bool:
        """Dial one address after the other, until the peer itself answers.

        An address may lead to another worker: every host has the same docker0.
        """
        addresses = self._routes.to(entry.member)
        if not addresses and self.ask_to_dial is not None and entry.member.gateway:
            await self.ask_to_dial(entry.member)
            return False  # as if it had dialed already: its connection is waited for
        failed: dict[Address, TransportError] = {}
        dialled: Dialled[Connection] | None = None
        try:
            async with asyncio.timeout(self._routes.timeout_s):
                while True:
                    untried = [
                        address for address in addresses if address not in failed
                    ]
                    with turn.connecting():
                        dialled = await self._race(entry, attempt, untried, failed)
                    hello = await self._answer_of(entry, dialled, failed)
                    if hello is not None:
                        turn.answered()
                        break
        except TimeoutError:
            peer = None if dialled is None else dialled.transport.credentials
            raise _NoAnswerError(0 if peer is None else peer.pid) from None
        self._routes.worked(dialled.address)
        if not hello.verdict:
            return True
        dialled.handler.close()
        if hello.verdict != DUPLICATE:
            raise ConnectError(f"{entry.member.name!r} refused: {hello.verdict}")
        return False

    async def _race(
        self,
        entry: PeerEntry,
        attempt: int,
        untried: list[Address],
        failed: dict[Address, TransportError],
    ) -> Dialled[Connection]:
        """Connect to one of the addresses that are left."""
        if failed and not untried:
            raise _listed(failed)
        try:
            dialled = await self._routes.connect(
                untried, lambda: self._new_connection(entry, attempt)
            )
        except AuthenticationError:
            raise
        except ConnectError as error:
            if failed:
                raise _listed(failed, str(error)) from error
            raise
        dialled.handler.address = dialled.address
        return dialled

    async def _answer_of(
        self,
        entry: PeerEntry,
        dialled: Dialled[Connection],
        failed: dict[Address, TransportError],
    ) -> Hello | None:
        """Return the peer's HELLO; None if what answers there is not the peer."""
        try:
            hello = await dialled.handler.until_open()
        except ConnectionLostError as error:
            failed[dialled.address] = error
            return None
        if hello.verdict and hello.name != entry.member.name:
            dialled.handler.close()
            name = entry.member.name
            failed[dialled.address] = ConnectError(f"{name!r} refused: {hello.verdict}")
            return None
        return hello

    def _new_connection(self, entry: PeerEntry, attempt: int) -> Connection:
        def introduce(connection: Connection) -> None:
            if self._handshakes.is_trusted(connection):
                expects = entry.member.name
                # A guest is asked to dial by members that seem to dial it meanwhile;
                # guests dial each other as members do.
                is_guest = self._routes.gateway is not None
                number = attempt + (is_guest and not entry.member.gateway)
                ours = self._identity.hello(expects=expects, attempt=number)
                connection.hello(ours)

        def on_hello(connection: Connection, hello: Hello) -> None:
            self._answers.on_answer(entry, connection, hello)

        return self._handshakes.make(Role.DIALER, introduce, on_hello)


def _listed(failed: dict[Address, TransportError], more: str = "") -> TransportError:
    """Return one error for all addresses that have failed."""
    first = next(iter(failed.values()))
    if len(failed) == 1 and not more:
        return first
    reasons = "; ".join(f"{address}: {why}" for address, why in failed.items())
    is_broken = isinstance(first, ConnectionLostError)
    kind = ConnectionLostError if is_broken else ConnectError
    return kind(f"{reasons}; {more}" if more else reasons)


class _Dial:
    """One dial: all attempts for the tasks that wait for a link to one peer."""

    def __init__(
        self,
        entry: PeerEntry,
        group: GroupRecords | None,
        dial_once: Callable[[PeerEntry, int, DialTurn], Awaitable[bool]],
        routes: Routes,
        turns: DialTurns,
        *,
        processes: Liveness,
    ) -> None:
        self._entry = entry
        self._group = group
        self._dial_once = dial_once
        self._routes = routes
        self._turns = turns
        self._processes = processes
        self._attempts = DialAttempts(routes.timeout_s)
        self._dialled = entry.member  # what the last attempt was made to
        self._error: BaseException | None = None  # of the last attempt

    async def run(self) -> Link:
        """Take every step; see `Dialer.dial`."""
        if self._group is not None:
            await self._group.settle(self._entry.member.name)
        attempts = self._attempts
        while not attempts.is_over:
            attempts.on(await self._step())
        if self._entry.link is not None:
            return self._entry.link
        # Not also kept here: the error keeps its frames, and they keep this object.
        error, self._error = self._error, None
        raise self._unreachable(error) from error

    async def _step(self) -> DialEvent:  # noqa: PLR0911  (one for each state)
        match self._attempts.state:
            case DialState.READY if self._may_have_to_dial:
                return await self._look_and_dial()
            case DialState.READY:
                return self._look()
            case DialState.AWAITING_PROOF:
                return await self._await_proof()
            case DialState.AWAITING_WINNER:
                return await self._await_winner()
            case DialState.PAUSED:
                await asyncio.sleep(self._attempts.pause_s)
                return DialEvent.SETTLED
            case DialState.INQUIRING:
                return await self._inquire()
            case DialState.ASKING:
                return await self._ask()
        raise AssertionError("a dial that is over takes no step")

    @property
    def _may_have_to_dial(self) -> bool:
        is_free = self._entry.machine.connection is None
        return is_free and not self._attempts.is_exhausted

    async def _look_and_dial(self) -> DialEvent:
        """Look when the turn has come, or the peer's own connection instead."""
        entry = self._entry
        while True:
            entry.settled.clear()
            with self._turns.dial_turn(entry.member.name, entry.settled) as turn:
                await turn.begun()
                if not turn.is_held and entry.machine.connection is None:
                    continue  # the peer's connection has come, and ended
                event = self._look()
                if event is not DialEvent.FREE:
                    return event
                self._attempts.on(event)
                return await self._attempt(turn)

    def _look(self) -> DialEvent:
        attempts = self._attempts
        if self._entry.link is not None:
            return DialEvent.LINKED
        if attempts.is_exhausted:
            self._error = None
            return DialEvent.EXHAUSTED
        may_dial = self._entry.machine.want(attempts.number)
        return DialEvent.FREE if may_dial else DialEvent.TAKEN

    async def _attempt(self, turn: DialTurn) -> DialEvent:
        self._dialled = self._entry.member
        if self._attempts.spared:
            turn.end()  # a busy peer holds up no other dial
        try:
            is_open = await self._dial_once(self._entry, self._attempts.number, turn)
        except AuthenticationError:
            raise
        except (TransportError, TimeoutError) as error:
            self._error = error
            if isinstance(error, UnansweredError | TimeoutError):
                return DialEvent.UNANSWERED
            if isinstance(error, ConnectionLostError):
                return DialEvent.BROKE
            # Nobody was told that it is there: it was listed.
            is_unmet = self._dialled.incarnation == UNKNOWN_INCARNATION
            is_refused = isinstance(error, RefusedError)
            return DialEvent.ABSENT if is_unmet and is_refused else DialEvent.UNREACHED
        return DialEvent.OPENED if is_open else DialEvent.DUPLICATE

    async def _await_proof(self) -> DialEvent:
        """Wait until a connection that was taken is open at the peer too, or ends."""
        connection = self._entry.machine.connection
        assert connection is not None  # no other task dials
        is_settled = await self._settles_in(self._routes.timeout_s)
        if not is_settled and not connection.is_broken:  # else others end it
            connection.end(
                ConnectionLostError("the peer that dialed it does not use it")
            )
        return DialEvent.SETTLED

    async def _await_winner(self) -> DialEvent:
        """Wait a little for the connection that the peer has dialed."""
        machine = self._entry.machine
        if machine.connection is None and not await self._settles_in(DUPLICATE_WAIT_S):
            machine.on_dial_failed()
        return DialEvent.SETTLED

    async def _settles_in(self, timeout_s: float) -> bool:
        self._entry.settled.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._entry.settled.wait()
        except TimeoutError:
            return False
        return True

    async def _inquire(self) -> DialEvent:
        """Ask what became of the peer's process, which has not answered."""
        pid = self._error.pid if isinstance(self._error, _NoAnswerError) else 0
        evidence = await self._processes.evidence_of_unmet(self._dialled, pid)
        return _OF_EVIDENCE.get(evidence, DialEvent.NOT_KNOWN)

    async def _ask(self) -> DialEvent:
        """Ask whether another attempt may succeed after one that failed."""
        may_go_on = self._has_news()
        if not may_go_on and self._group is not None:
            may_go_on = await self._group.refresh(self._dialled.name)
        may_go_on = may_go_on or self._has_news()  # arrived while others were asked
        return DialEvent.MOVED if may_go_on else DialEvent.NOT_MOVED

    def _has_news(self) -> bool:
        """Return whether the peer has dialed itself, or is known to be elsewhere."""
        entry = self._entry
        return entry.machine.connection is not None or entry.member != self._dialled

    def _unreachable(self, error: BaseException | None) -> WorkerLostError:
        why = "both sides kept dialing" if error is None else str(error)
        why = why or f"no connection in {self._routes.timeout_s:g} s"
        if passed_over := self._routes.passed_over(self._entry.member):
            why = f"{why}; not tried: {passed_over}"
        return WorkerLostError(
            f"it cannot be reached: {why}",
            to=self._entry.member.name,
            function="connect",
            outcome=Outcome.NOT_EXECUTED,
        )
