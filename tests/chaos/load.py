"""The load: what the workers call on each other, and what they enter in their logs."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, Final, TypeAlias, cast

import torch

import asyncrpc
from asyncrpc import AsyncRpcError, CallError, Outcome, RRef, Worker
from tests.chaos.log import Log

LOOPS: Final = 6  # things that one worker does at a time
PAUSE_S: Final = 0.1  # mean, between two of them
LIMITS_S: Final = (0.3, 2.0, 8.0, 15.0)
TICK_S: Final = 0.1

Kind: TypeAlias = Callable[["Load", str], Coroutine[Any, Any, None]]


class ChaosWorker(Worker):
    """A worker with logs."""

    def __init__(self, name: str, ran: Log, **given: Any) -> None:
        super().__init__(name, **given)
        self.ran = ran
        self.kept: list[RRef[Counter]] = []


def begin(call_id: str) -> None:
    cast("ChaosWorker", asyncrpc.current_worker()).ran.write("B", call_id)


# --- what is called ------------------------------------------------------------------


async def run(call_id: str) -> str:
    begin(call_id)
    return call_id


def run_plain(call_id: str) -> str:
    begin(call_id)
    return call_id


async def sleep(call_id: str, seconds: float) -> str:
    begin(call_id)
    await asyncio.sleep(seconds)
    return call_id


def block(call_id: str, seconds: float) -> str:
    begin(call_id)
    time.sleep(seconds)
    return call_id


def double(call_id: str, value: torch.Tensor) -> torch.Tensor:
    begin(call_id)
    return value * 2


async def relay(call_id: str, to: str) -> str:
    """Call on, in the time that is left."""
    begin(call_id)
    with contextlib.suppress(AsyncRpcError):
        await asyncrpc.current_worker().peer(to).call(run, f"{call_id}/1")
    return call_id


async def count_to(call_id: str, end: int) -> AsyncIterator[torch.Tensor]:
    begin(call_id)
    for number in range(end):
        yield torch.full((4096,), float(number))


class Counter:
    """What references refer to."""

    def __init__(self, call_id: str) -> None:
        begin(call_id)
        self.count = 0

    def add(self, call_id: str) -> str:
        begin(call_id)
        self.count += 1
        return call_id


async def keep(call_id: str, rref: RRef[Counter]) -> str:
    begin(call_id)
    kept = cast("ChaosWorker", asyncrpc.current_worker()).kept
    kept.append(rref)
    del kept[:-8]
    return call_id


# --- who calls -----------------------------------------------------------------------


class Load:
    """What one worker calls, until it is told to stop."""

    def __init__(
        self, worker: ChaosWorker, peers: list[str], told: Log, seed: int
    ) -> None:
        self.worker = worker
        self.rng = random.Random(seed)
        self.problems: list[str] = []
        self._peers = peers
        self._told = told
        self._numbers = itertools.count()
        self._stopping = asyncio.Event()
        self._awake_s = 0.0

    async def go_on(self) -> None:
        """Make calls until `stop`."""
        async with asyncio.TaskGroup() as tasks:
            awake = tasks.create_task(self._count_awake())
            loops = [tasks.create_task(self._loop()) for _ in range(LOOPS)]
            await asyncio.wait(loops)
            awake.cancel()

    def stop(self) -> None:
        """Make no more calls; those that are under way end by themselves."""
        self._stopping.set()

    async def _count_awake(self) -> None:
        """Count the time, but not while this process is stopped."""
        last_s = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            now_s = time.monotonic()
            self._awake_s += min(now_s - last_s, 5 * TICK_S)
            last_s = now_s

    async def _loop(self) -> None:
        kinds = list(KINDS)
        while not self._stopping.is_set():
            kind = self.rng.choices(kinds, list(KINDS.values()))[0]
            try:
                await kind(self, self.rng.choice(self._peers))
            except (AsyncRpcError, TimeoutError):
                pass  # entered already, or befell a call of which nobody is told
            except Exception as error:  # noqa: BLE001  (whatever it is, it is a finding)
                self.problems.append(f"{kind.__name__}: {error!r}")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.rng.expovariate(1 / PAUSE_S)):
                    await self._stopping.wait()

    def new_id(self) -> str:
        """Return the number of a call, which no other call of the run has."""
        return f"{self.worker.name}.{os.getpid()}.{next(self._numbers)}"

    async def enter(
        self, what: str, make: Callable[[str], Awaitable[Any]]
    ) -> tuple[str, Any]:
        """Make a call within a limit; enter both.

        Raises:
            AsyncRpcError: what became of it, entered.
            TimeoutError: likewise; a deadline that is no call's own.
        """
        call_id, limit_s = self.new_id(), self.rng.choice(LIMITS_S)
        self._told.write("M", call_id, limit_s, what)
        begun_s = self._awake_s

        def tell(outcome: Outcome, error: str) -> None:
            took_s = self._awake_s - begun_s
            self._told.write("C", call_id, outcome.name, f"{took_s:.2f}", error)

        try:
            async with asyncrpc.deadline(limit_s):
                result = await make(call_id)
        except (AsyncRpcError, TimeoutError) as caught:
            is_call = isinstance(caught, CallError)
            outcome = caught.outcome if is_call else Outcome.UNKNOWN  # type: ignore[union-attr]
            tell(outcome, type(caught).__name__)
            raise
        tell(Outcome.EXECUTED, "")
        return call_id, result

    async def expect(self, what: str, make: Callable[[str], Awaitable[Any]]) -> str:
        """Make a call that returns its own number."""
        call_id, result = await self.enter(what, make)
        if result != call_id:
            self.problems.append(f"{what} {call_id} returned {result!r}")
        return call_id

    def excused(self, what: str) -> str:
        """Enter a call of which nobody is told how it ends."""
        call_id = self.new_id()
        self._told.write("M", call_id, 0.0, what)
        self._told.write("X", call_id)
        return call_id


async def small(load: Load, to: str) -> None:
    function = load.rng.choice([run, run_plain])
    peer = load.worker.peer(to)
    await load.expect(f"{function.__name__} {to}", lambda it: peer.call(function, it))


async def slow(load: Load, to: str) -> None:
    function = load.rng.choice([sleep, block])
    seconds, peer = load.rng.uniform(0.0, 1.0), load.worker.peer(to)
    await load.expect(
        f"{function.__name__} {to}", lambda it: peer.call(function, it, seconds)
    )


async def tensor(load: Load, to: str) -> None:
    elements = load.rng.choice([100, 1 << 14, 1 << 18, 1 << 21])
    value = torch.full((elements,), load.rng.random())
    peer = load.worker.peer(to)
    call_id, result = await load.enter(
        f"double {to}", lambda it: peer.call(double, it, value)
    )
    if result.shape != value.shape or not torch.equal(result, value * 2):
        load.problems.append(f"double {call_id} returned something else")


async def nested(load: Load, to: str) -> None:
    further = load.rng.choice(load._peers)  # noqa: SLF001  (of this module)
    peer = load.worker.peer(to)
    await load.expect(f"relay {to}", lambda it: peer.call(relay, it, further))


async def stream(load: Load, to: str) -> None:
    call_id, length = load.excused(f"stream {to}"), load.rng.randrange(60)
    seen = 0
    async with asyncrpc.deadline(load.rng.choice(LIMITS_S)):
        items: Any = load.worker.peer(to).stream(count_to, call_id, length)
        async with contextlib.aclosing(items):
            async for item in items:
                if float(item[0]) != seen:
                    load.problems.append(f"stream {call_id}: a gap before {seen}")
                seen += 1
    if seen != length:
        load.problems.append(f"stream {call_id}: {seen} items of {length}")


async def cancelled(load: Load, to: str) -> None:
    call_id, seconds = load.excused(f"cancelled {to}"), load.rng.uniform(0.0, 1.0)
    task = asyncio.create_task(load.worker.peer(to).call(sleep, call_id, seconds))
    await asyncio.wait([task], timeout=load.rng.uniform(0.0, 1.0))
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def reference(load: Load, to: str) -> None:
    """Make a value, use it, pass it on, use it again, and let go."""
    third = load.rng.choice(load._peers)  # noqa: SLF001  (of this module)
    peer = load.worker.peer(third)
    made = load.excused(f"remote {to}")
    async with asyncrpc.deadline(load.rng.choice(LIMITS_S)):
        rref = load.worker.peer(to).remote(Counter, made)
    await load.expect(f"add {to}", lambda it: rref.rpc_async().add(it))
    await load.expect(f"keep {third}", lambda it: peer.call(keep, it, rref))
    await load.expect(f"add {to}", lambda it: rref.rpc_async().add(it))


KINDS: Final[dict[Kind, int]] = {
    small: 8,
    slow: 3,
    tensor: 4,
    nested: 3,
    stream: 2,
    cancelled: 2,
    reference: 3,
}
