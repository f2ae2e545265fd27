"""What the tests of references call on other workers: importable in any process."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Any

import torch

import asyncrpc
from asyncrpc import NetworkOptions, Options, RRef, Worker
from asyncrpc.testing.loop import SimLoop

NOTHING = {"owned": 0, "held": 0, "values": 0}
SIM_OPTIONS = Options(
    drain_timeout_s=2.0, network=NetworkOptions(connect_timeout_s=5.0)
)


def counts(worker: Worker) -> dict[str, int]:
    service: Any = worker.parts.references
    totals: dict[str, int] = service.counts()
    return totals


async def all_freed(*workers: Worker) -> None:
    """Wait until no worker owns or holds anything; a leak ends as a timeout."""
    is_simulated = isinstance(asyncio.get_running_loop(), SimLoop)
    async with asyncio.timeout(60 if is_simulated else 15):
        while any(
            counts(worker) != NOTHING for worker in workers if not worker.is_closed
        ):
            gc.collect()
            await asyncio.sleep(1.0 if is_simulated else 0.01)


async def until(holds: Callable[[], bool]) -> None:
    """Wait until something is so that no event tells of."""
    is_simulated = isinstance(asyncio.get_running_loop(), SimLoop)
    async with asyncio.timeout(60 if is_simulated else 15):
        while not holds():  # noqa: ASYNC110  (nothing tells)
            await asyncio.sleep(0.1 if is_simulated else 0.01)


class Counter:
    """A value with state."""

    def __init__(self, start: int = 0) -> None:
        self.count = start

    def add(self, by: int = 1) -> int:
        self.count += by
        return self.count


class Node:
    """A value that refers to others: with `peer`, one half of a circle."""

    def __init__(self) -> None:
        self.peer: RRef[Node] | None = None

    def point_to(self, peer: RRef[Node]) -> None:
        self.peer = peer

    def release(self) -> None:
        assert self.peer is not None
        self.peer.release()


kept: dict[str, list[RRef[Any]]] = {}  # by the name of the worker
waiting: list[asyncio.Task[str]] = []  # each for a value


def keep(rref: RRef[Any]) -> None:
    kept.setdefault(asyncrpc.current_worker().name, []).append(rref)


async def keep_async(rref: RRef[Any]) -> None:
    keep(rref)


def let_go() -> None:
    kept.pop(asyncrpc.current_worker().name, None)


async def let_go_async() -> None:
    let_go()


def look(rref: RRef[Any]) -> str:
    return rref.owner_name()


async def look_async(rref: RRef[Any]) -> str:
    return rref.owner_name()


async def count_of(rref: RRef[Counter]) -> int:
    return (await rref.to_here()).count


async def states() -> list[str]:
    """Return what this worker says of the references it has."""
    worker: Any = asyncrpc.current_worker()
    return [record.state for record in worker.rrefs()]


async def make(start: int) -> RRef[Counter]:
    return RRef(Counter(start))


async def make_many(count: int) -> list[RRef[Counter]]:
    return [RRef(Counter(number)) for number in range(count)]


async def make_on(owner: str, start: int = 0) -> None:
    """Make a value on `owner`, hold it, and never let go."""
    rref: RRef[Any] = asyncrpc.current_worker().peer(owner).remote(Counter, start)
    await rref
    keep(rref)


async def make_for_ever(owner: str) -> None:
    """Begin to make a value on `owner` that takes for ever."""
    keep(asyncrpc.current_worker().peer(owner).remote(never))


async def lend_for_ever(owner: str, to: str) -> None:
    """Begin to make a value on `owner` that takes for ever; wait for it here and there.

    And lend it to worker `to`, which waits for it as well.
    """
    worker = asyncrpc.current_worker()
    rref: RRef[Any] = worker.peer(owner).remote(never)
    keep(rref)
    waiting.append(asyncio.create_task(fetch(rref)))
    await worker.peer(to).call(wait_for, rref)


async def fetch(rref: RRef[Any]) -> str:
    """Return the value's text, or that of what is raised instead."""
    try:
        return str(await rref.to_here())
    except asyncrpc.AsyncRpcError as error:
        return f"{type(error).__name__}: {error}"


async def wait_for(rref: RRef[Any]) -> None:
    """Wait for a value after this call."""
    waiting.append(asyncio.create_task(fetch(rref)))


async def fetched() -> list[str]:
    """Return what has come of the values that were waited for; wait for no more."""
    values = await asyncio.wait_for(asyncio.gather(*waiting), 30.0)
    waiting.clear()
    return values


async def never() -> Counter:
    await asyncio.Event().wait()
    raise AssertionError("it was to wait for ever")


def give(value: Any) -> Any:
    return value


def ignore(*_values: Any) -> None:
    """Take anything."""


def keep_all(*rrefs: RRef[Any]) -> None:
    for rref in rrefs:
        keep(rref)


def first_kept() -> RRef[Any]:
    return kept[asyncrpc.current_worker().name][0]


async def count_beside(rref: RRef[Counter], _much: torch.Tensor) -> int:
    return rref.local_value().count
