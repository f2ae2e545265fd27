"""The load: what the workers call on each other, and what they enter in their logs."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch

import asyncrpc
from asyncrpc import AsyncRpcError, CallError, Outcome, WorkerLostError
from asyncrpc.errors import (
    BackwardFailedError,
    GroupChangedError,
    InvalidContextError,
    ProtocolError,
    RankLostError,
    RRefDeletedError,
    RRefError,
    TransportError,
)
from tests.chaos.called import (
    ChaosWorker,
    Counter,
    block,
    count_to,
    double,
    keep,
    relay,
    run,
    run_plain,
    sleep,
)
from tests.chaos.log import MISTAKE, End, now_s

LOOPS: Final = 6  # right things that one worker does at a time
MISTAKE_LOOPS: Final = 2  # wrong ones
PAUSE_S: Final = 0.1  # mean, between two of them
LIMITS_S: Final = (0.3, 2.0, 8.0, 30.0)
TICK_S: Final = 0.1
# What says that a worker, a connection or a value is gone, and not that the call, the
# function or its arguments are wrong.
LOSSES: Final = (
    *(WorkerLostError, TransportError, ProtocolError, RRefError, RankLostError),
    *(GroupChangedError, BackwardFailedError, InvalidContextError),
)

Kind: TypeAlias = Callable[["Load", str], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class Wanted:
    """The error that a wrong call has to end with."""

    kinds: tuple[type[BaseException], ...]  # classes: one of them
    texts: tuple[str, ...]  # one of these is in its text
    # What it says of the function; None: whatever it likes.
    outcome: Outcome | None = None

    def fits(self, error: BaseException) -> bool:
        """Say whether an error is this one."""
        if not isinstance(error, self.kinds):
            return False
        is_right = self.outcome in (None, getattr(error, "outcome", None))
        return is_right and any(text in str(error) for text in self.texts)


def end_of(error: BaseException, wanted: Wanted | None) -> End:
    """Say how a call ended that raised."""
    if wanted is not None and wanted.fits(error):
        return End.AS_EXPECTED
    if isinstance(error, TimeoutError):
        return End.LATE
    # A reference cannot be sent either once the owner of its value is gone.
    is_loss = isinstance(error, LOSSES) or isinstance(error.__cause__, LOSSES)
    return End.LOST if is_loss else End.STRANGE


def in_one_line(text: str) -> str:
    """Return a text in one line that a terminal can show."""
    line = " ".join(text.split())
    return "".join(character if character.isprintable() else "?" for character in line)


class Load:
    """What one worker calls, until it is told to stop."""

    def __init__(
        self,
        worker: ChaosWorker,
        peers: Sequence[str],
        strict: Sequence[str],
        seed: int,
    ) -> None:
        self.worker = worker  # this process's
        self.rng = random.Random(seed)  # what is called when, by the seed
        self.peers = tuple(peers)  # names of the others
        self.strict = frozenset(strict)  # names of the workers whose policy is STRICT
        self._event_log = worker.event_log
        self._numbers = itertools.count()
        self._stopping = asyncio.Event()
        self._awake_s = 0.0

    async def go_on(self, mistakes: Mapping[Kind, int]) -> None:
        """Make right and wrong calls until `stop`."""
        kinds = [KINDS] * LOOPS + [mistakes] * MISTAKE_LOOPS
        async with asyncio.TaskGroup() as tasks:
            awake = tasks.create_task(self._count_awake())
            loops = [tasks.create_task(self._loop(kind)) for kind in kinds]
            await asyncio.wait(loops)
            awake.cancel()

    def stop(self) -> None:
        """Make no more calls; those that are under way end by themselves."""
        self._stopping.set()

    async def _count_awake(self) -> None:
        """Count the time, but not while this process is stopped."""
        last_s = now_s()
        while True:
            await asyncio.sleep(TICK_S)
            at_s = now_s()
            self._awake_s += min(at_s - last_s, 5 * TICK_S)
            last_s = at_s

    async def _loop(self, kinds: Mapping[Kind, int]) -> None:
        while not self._stopping.is_set():
            kind = self.rng.choices(list(kinds), list(kinds.values()))[0]
            try:
                await kind(self, self.rng.choice(self.peers))
            except (AsyncRpcError, TimeoutError):
                pass  # entered already, or befell a call of which nobody is told
            except Exception as error:  # noqa: BLE001  (whatever it is, it is a finding)
                self.find(f"{kind.__name__}: {error!r:.500}")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.rng.expovariate(1 / PAUSE_S)):
                    await self._stopping.wait()

    def new_id(self) -> str:
        """Return the number of a call, which no other call of the run has."""
        return f"{self.worker.name}.{os.getpid()}.{next(self._numbers)}"

    async def enter(
        self,
        what: str,
        parties: tuple[str, ...],
        make: Callable[[str], Awaitable[Any]],
        *,
        wanted: Wanted | None = None,
        since_s: float | None = None,
        claims: bool = True,
    ) -> tuple[str, Any]:
        """Make a call within a limit; enter both.

        Args:
            wanted: the error that it has to end with; None: none.
            since_s: when what it needs was made, by `now_s`; None: now.
            claims: whether its outcome says something of the function that is logged.
        """
        call_id, limit_s = self.new_id(), self.rng.choice(LIMITS_S)
        self._write_made(call_id, limit_s, parties, what, since_s)
        begun_s = self._awake_s

        def tell(outcome: Outcome, end: End, *error: str) -> None:
            claimed = outcome if claims else Outcome.UNKNOWN
            took_s = f"{self._awake_s - begun_s:.2f}"
            at_s = f"{now_s():.4f}"
            self._event_log.write(
                "C", call_id, claimed.name, at_s, took_s, end.name, *error
            )

        try:
            async with asyncrpc.deadline(limit_s):
                result = await make(call_id)
        except asyncio.CancelledError:
            self._event_log.write("X", call_id)
            raise
        except Exception as caught:
            is_call = isinstance(caught, CallError)
            outcome = caught.outcome if is_call else Outcome.UNKNOWN  # type: ignore[attr-defined]
            end = end_of(caught, wanted)
            tell(
                outcome,
                end,
                type(caught).__name__.split()[0][:40],
                in_one_line(f"{caught!s:.300}"),
            )
            if end is End.STRANGE:
                self._find(what, call_id, parties, f"raised {caught!r:.300}")
            raise
        tell(Outcome.EXECUTED, End.AS_EXPECTED if wanted is None else End.STRANGE)
        if wanted is not None:
            self._find(what, call_id, parties, f"returned {result!r:.100}")
        return call_id, result

    def find(self, problem: str) -> None:
        """Enter a finding, so that it is known even if this worker is killed."""
        self._event_log.write("F", in_one_line(problem))

    def _find(
        self, what: str, call_id: str, parties: tuple[str, ...], problem: str
    ) -> None:
        self.find(f"{what} {call_id} to {', '.join(parties)} {problem}")

    def _write_made(
        self,
        call_id: str,
        limit_s: float,
        parties: tuple[str, ...],
        what: str,
        since_s: float | None = None,
    ) -> None:
        at_s = now_s()
        since_s = at_s if since_s is None else since_s
        self._event_log.write(
            *("M", call_id, f"{at_s:.4f}", f"{since_s:.4f}", limit_s),
            *(",".join(parties), what),
        )

    async def expect(
        self,
        what: str,
        parties: tuple[str, ...],
        make: Callable[[str], Awaitable[Any]],
        *,
        since_s: float | None = None,
    ) -> str:
        """Make a call that returns its own number."""
        call_id, result = await self.enter(what, parties, make, since_s=since_s)
        if result != call_id:
            self._find(what, call_id, parties, f"returned {result!r:.100}")
        return call_id

    async def mistake(
        self,
        what: str,
        parties: tuple[str, ...],
        wanted: Wanted,
        make: Callable[[str], Awaitable[Any]],
        *,
        claims: bool = True,
    ) -> None:
        """Make a wrong call; what it raises is entered and goes no further."""
        with contextlib.suppress(Exception):
            await self.enter(
                f"{MISTAKE} {what}", parties, make, wanted=wanted, claims=claims
            )

    def excused(self, what: str, to: str) -> str:
        """Enter a call of which nobody is told how it ends."""
        call_id = self.new_id()
        self._write_made(call_id, 0.0, (to,), what)
        self._event_log.write("X", call_id)
        return call_id


async def small(load: Load, to: str) -> None:
    function, peer = load.rng.choice([run, run_plain]), load.worker.peer(to)
    await load.expect(function.__name__, (to,), lambda it: peer.call(function, it))


async def slow(load: Load, to: str) -> None:
    function, peer = load.rng.choice([sleep, block]), load.worker.peer(to)
    seconds = load.rng.uniform(0.0, 1.0)
    await load.expect(
        function.__name__, (to,), lambda it: peer.call(function, it, seconds)
    )


async def tensor(load: Load, to: str) -> None:
    elements = load.rng.choice([100, 1 << 14, 1 << 18, 1 << 21])
    value = torch.full((elements,), load.rng.random())
    peer = load.worker.peer(to)
    call_id, result = await load.enter(
        "double", (to,), lambda it: peer.call(double, it, value)
    )
    if result.shape != value.shape or not torch.equal(result, value * 2):
        load.find(f"double {call_id} returned something else")


async def nested(load: Load, to: str) -> None:
    further, peer = load.rng.choice(load.peers), load.worker.peer(to)
    await load.expect("relay", (to,), lambda it: peer.call(relay, it, further))


async def stream(load: Load, to: str) -> None:
    length = load.rng.randrange(60)

    async def take_all(call_id: str) -> int:
        seen = 0
        items: Any = load.worker.peer(to).stream(count_to, call_id, length)
        async with contextlib.aclosing(items):
            async for item in items:
                if float(item[0]) != seen:
                    load.find(f"stream {call_id}: a gap before {seen}")
                seen += 1
        return seen

    call_id, seen = await load.enter("stream", (to,), take_all, claims=False)
    if seen != length:
        load.find(f"stream {call_id}: {seen} items of {length}")


async def cancelled(load: Load, to: str) -> None:
    call_id, seconds = load.excused("cancelled", to), load.rng.uniform(0.0, 1.0)
    task = asyncio.create_task(load.worker.peer(to).call(sleep, call_id, seconds))
    await asyncio.wait([task], timeout=load.rng.uniform(0.0, 1.0))
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def reference(load: Load, to: str) -> None:
    """Make a value, use it, pass it on, use it again, and let go."""
    third = load.rng.choice(load.peers)
    peer, since_s, limit_s = load.worker.peer(third), now_s(), load.rng.choice(LIMITS_S)
    call_id = load.excused("remote", to)
    async with asyncrpc.deadline(limit_s):
        rref = load.worker.peer(to).remote(Counter, call_id)

    async def add_here(call_id: str) -> str:
        try:
            return await rref.rpc_async().add(call_id)  # type: ignore[no-any-return]
        except RRefDeletedError as error:
            if now_s() < since_s + limit_s:
                raise
            raise TimeoutError("the value was not made in its time") from error

    async def add() -> None:
        await load.expect("add", (to,), add_here, since_s=since_s)

    await add()
    await load.expect(
        "keep", (third, to), lambda it: peer.call(keep, it, rref), since_s=since_s
    )
    await add()


KINDS: Final[dict[Kind, int]] = {
    small: 8,
    slow: 3,
    tensor: 4,
    nested: 3,
    stream: 2,
    cancelled: 2,
    reference: 3,
}
