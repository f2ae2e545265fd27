"""A world of workers on virtual time: who lives, who talks to whom, what goes wrong.

All chance comes from the network's seed.  What must hold is entered in `problems` when
it does not, so that one run may show several.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from asyncrpc import (
    AsyncRpcError,
    CallError,
    LimitOptions,
    LivenessOptions,
    NetworkOptions,
    Options,
    Outcome,
    RRef,
)
from asyncrpc.core.ids import Incarnation
from asyncrpc.core.membership.rendezvous import (
    UNKNOWN_INCARNATION,
    JoinRendezvous,
    Member,
)
from asyncrpc.errors import NotStartedError, RRefDeletedError
from asyncrpc.testing.network import Network
from tests.simulation.participant import Participant, Value


@dataclass(slots=True)
class Ledger:
    """The calls of one run.

    Attributes:
        calls: who made each call, and what it was.
        ran: on which worker each call ran, as often as it did.
        claims: how each call ended, for who made it.
        reasons: the errors among them.
        errors: how often each class of them came.
        excused: calls of which nobody was told how they ended.
    """

    calls: dict[int, str] = field(default_factory=dict)
    ran: dict[int, list[str]] = field(default_factory=dict)
    claims: dict[int, Outcome] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    errors: Counter[str] = field(default_factory=Counter)
    excused: set[int] = field(default_factory=set)

    def new(self, what: str) -> int:
        """Enter a call that is about to be made; return its number."""
        number = len(self.calls)
        self.calls[number] = what
        return number

    def begin(self, number: int, where: str) -> None:
        """Enter that a function runs."""
        self.ran.setdefault(number, []).append(where)

    def claim(self, number: int, error: BaseException | None) -> None:
        """Enter how a call ended for its caller."""
        outcome = Outcome.EXECUTED
        if error is not None:
            self.errors[type(error).__name__] += 1
            self.reasons[number] = repr(error)  # no traceback: it holds handles
            is_call = isinstance(error, CallError)
            outcome = error.outcome if is_call else Outcome.UNKNOWN  # type: ignore[attr-defined]
        self.claims[number] = outcome

    def excuse(self, number: int) -> None:
        """Enter that the caller died, or gave up: nobody is told how it ended."""
        self.excused.add(number)

    def problems(self) -> list[str]:
        """Return every disagreement, in words."""
        wrongs = []
        for number, what in self.calls.items():
            ran = self.ran.get(number, [])
            outcome = self.claims.get(number)
            why = self.reasons.get(number, "")
            if len(ran) > 1:
                wrongs.append(f"call {number} ({what}) ran twice: on {ran}")
            if outcome is None and number not in self.excused:
                wrongs.append(f"call {number} ({what}) was never answered")
            if outcome is Outcome.EXECUTED and not ran:
                wrongs.append(
                    f"call {number} ({what}) did not run, but is EXECUTED: {why}"
                )
            if outcome is Outcome.NOT_EXECUTED and ran:
                wrongs.append(f"call {number} ({what}) ran, but is NOT_EXECUTED: {why}")
        return wrongs


OPTIONS: Final = Options(
    drain_timeout_s=2.0,
    network=NetworkOptions(connect_timeout_s=3.0),
    liveness=LivenessOptions(heartbeat_s=2.0, lost_after_s=5.0),
    limits=LimitOptions(shared_memory_bytes=0, receive_pool_bytes=0),
)
HANG_S: Final = 200.0  # of virtual time: longer than any limit, and any row of them
DOING_MAX: Final = 8  # things that one worker does at a time


@dataclass(frozen=True, slots=True)
class Roster:
    """A rendezvous that gives a worker the names of those it begins with."""

    names: Sequence[str]

    async def join(self, member: Member, timeout_s: float) -> Sequence[Member]:
        """Return them, wherever they are in their lives."""
        return [
            Member(name, -1, UNKNOWN_INCARNATION, (f"mem://{name}",))
            for name in self.names
        ]

    async def leave(self, timeout_s: float) -> None:
        """Nothing is held."""


def acquaintances(neighbours: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Return whom each worker begins with: all that may speak to it, or it to them.

    That is its neighbours, theirs, who may pass on what those own, and whoever has it
    among these.
    """
    known: dict[str, dict[str, None]] = {name: {name: None} for name in neighbours}
    for name, near in neighbours.items():
        farther = (far for middle in near for far in neighbours[middle])
        for peer in dict.fromkeys([*near, *farther]):
            known[name][peer] = None
            known[peer][name] = None
    return {name: list(others) for name, others in known.items()}


class Values:
    """Every value that was made, for as long as somebody holds it."""

    def __init__(self) -> None:
        self.count = 0
        self._alive: weakref.WeakValueDictionary[int, Value] = (
            weakref.WeakValueDictionary()
        )
        self._owners: dict[int, Incarnation] = {}

    def new(self) -> int:
        """Return a number for a value that is about to be made."""
        self.count += 1
        return self.count

    def add(self, number: int, value: Value, owner: Participant) -> None:
        """Enter a value."""
        self._alive[number] = value
        self._owners[number] = owner.incarnation

    def owner(self, number: int) -> Incarnation | None:
        """Return who owns a value; None if it was never made."""
        return self._owners.get(number)

    def is_freed(self, number: int) -> bool:
        """Say whether nobody holds it."""
        return number not in self._alive

    def alive(self) -> list[int]:
        """Return the values that have not been freed."""
        return sorted(self._alive)


class World:
    """Workers by name, what they do, and what goes wrong.

    Attributes:
        network: between them.
        ledger: of their calls.
        values: that they made.
        lives: the workers that run.
        neighbours: whom each of them calls.
        buried: incarnations that have ended.
        problems: what should not have been, in words.
    """

    def __init__(
        self,
        network: Network,
        neighbours: dict[str, list[str]],
        options: Options = OPTIONS,
    ) -> None:
        self.network = network
        self.rng = network.rng
        self.ledger = Ledger()
        self.values = Values()
        self.lives: dict[str, Participant] = {}
        self.neighbours = neighbours
        self.buried: dict[Incarnation, str] = {}
        self.problems: list[str] = []
        self.done: Counter[str] = Counter()
        self._options = options
        self._knows = acquaintances(neighbours)
        self._doing: dict[str, dict[asyncio.Task[Any], None]] = {}

    # --- lives ---

    async def begin(self) -> None:
        """Start every worker."""
        for name in self.neighbours:
            await self.start(name)

    async def start(self, name: str) -> Participant:
        """Start a worker, for the first time or again."""
        knows = self._knows[name]
        # In a dynamic group who comes again joins: nobody else knows which of its lives
        # is the later.
        others = [f"mem://{known_name}" for known_name in knows if known_name != name]
        is_dynamic = self._options.membership == "dynamic"
        again = is_dynamic and name in self.buried.values()
        where = JoinRendezvous(others) if again else Roster(tuple(knows))
        worker = Participant(self, name, rendezvous=where, options=self._options)
        self.lives[name] = await worker.__aenter__()
        self._doing[name] = {}
        return worker

    async def crash(self, name: str, *, silent: bool) -> None:
        """End a worker without a word."""
        worker = self.lives.pop(name)
        self.buried[worker.incarnation] = name
        self.network.crash(name, silent=silent)
        await self._stop(worker, drain_s=0.0)

    async def restart(self, name: str) -> None:
        """Start a worker again, under its old name."""
        self.network.restart(name)
        await self.start(name)

    async def leave(self, name: str) -> None:
        """End a worker in order."""
        worker = self.lives.pop(name)
        self.buried[worker.incarnation] = name
        await self._stop(worker, drain_s=None)

    async def _stop(self, worker: Participant, drain_s: float | None) -> None:
        doing = tuple(self._doing.pop(worker.name))
        for task in doing:
            task.cancel()
        await worker.shutdown(drain_timeout_s=drain_s)
        if doing:
            await asyncio.wait(doing)
        worker.kept.clear()

    # --- what they do ---

    def do(self, worker: Participant, action: Coroutine[Any, Any, None]) -> None:
        """Let a worker do something beside what it does already."""
        doing = self._doing.get(worker.name)
        if doing is None or len(doing) >= DOING_MAX:
            action.close()
            return
        task = self.network.loop.create_task(self._within_limit(worker, action))
        doing[task] = None
        task.add_done_callback(doing.pop)

    async def _within_limit(
        self, worker: Participant, action: Coroutine[Any, Any, None]
    ) -> None:
        name: str = action.cr_code.co_name  # type: ignore[attr-defined]  # a coroutine's
        try:
            async with asyncio.timeout(HANG_S):
                await action
        except TimeoutError:
            self.problems.append(f"{worker.name}: {name} hangs")
        except NotStartedError:
            if self.lives.get(worker.name) is worker:
                self.problems.append(f"{worker.name}: {name}: it is not running")
        except Exception as error:  # noqa: BLE001  (whatever it is, it is a finding)
            self.problems.append(f"{worker.name}: {name} raised {error!r}")
        else:
            self.done[name] += 1

    async def rest(self) -> None:
        """Wait until nobody does anything any more."""
        while doing := [task for tasks in self._doing.values() for task in tasks]:
            await asyncio.wait(doing)

    # --- calls ---

    async def call(
        self, me: Participant, to: str, function: Callable[..., Any], *args: Any
    ) -> None:
        """Make a call, and enter what becomes of it."""
        what = f"{me.name} calls {function.__name__} on {to}"
        await self.enter(
            what,
            lambda number: me.parts.start_call(to, function, (number, *args)),
            lambda number: number,
        )

    async def use(self, me: Participant, rref: RRef[Value], number: int) -> None:
        """Use a reference, and enter what becomes of it."""
        what = f"{me.name} uses value {number}"
        is_confirmed = rref.confirmed_by_owner()
        error = await self.enter(
            what, lambda call: rref.rpc_async().get(call), lambda _call: number
        )
        if isinstance(error, RRefDeletedError) and is_confirmed:
            self.problems.append(f"I1: {what}, which it holds, and it is gone: {error}")

    async def enter(
        self,
        what: str,
        make: Callable[[int], Awaitable[Any]],
        expected: Callable[[int], Any],
    ) -> BaseException | None:
        """Make a call and enter how it ended; return its error."""
        number = self.ledger.new(what)
        self.network.note(f"call {number}: {what}")
        caught: BaseException | None = None
        try:
            result = await make(number)
        except (asyncio.CancelledError, NotStartedError):
            self.ledger.excuse(number)
            raise
        except AsyncRpcError as error:
            caught = error
        else:
            if result != expected(number):
                self.problems.append(f"call {number} ({what}) returned {result!r}")
        self.ledger.claim(number, caught)
        self.network.note(f"call {number}: {caught or 'answered'}")
        return caught

    # --- the end ---

    async def settle(self, seconds: float) -> None:
        """Heal the network, and let so much time pass."""
        self.network.heal_all()
        await asyncio.sleep(seconds)

    async def end(self) -> None:
        """Shut every worker down, in order."""
        for name in tuple(self.lives):
            with contextlib.suppress(KeyError):
                await self.leave(name)
