"""What the soak does: one coroutine for each kind of use, and what it calls."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch

import asyncrpc
from asyncrpc import RemoteError, Worker
from asyncrpc.core.peers.peer import Peer

SMALL: Final = 256
LARGE: Final = 256 << 10  # elements of 4 bytes: 1 MiB, by shared memory or a lane


# --- what runs on the other side -----------------------------------------------------


class Counter:
    def __init__(self, start: int) -> None:
        self.count = start

    def add(self, by: int) -> int:
        self.count += by
        return self.count


KEPT: dict[int, asyncrpc.RRef[Counter]] = {}


async def add(x: int, y: int) -> int:
    return x + y


def add_in_thread(x: int, y: int) -> int:
    return x + y


async def double(value: torch.Tensor) -> torch.Tensor:
    return value * 2


async def fail(text: str) -> None:
    raise ValueError(text)


def fail_in_thread(value: torch.Tensor) -> None:
    raise ValueError(f"{value.numel()} elements")


async def sleep_on(*_given: object) -> None:
    await asyncio.Event().wait()


async def numbers(count: int) -> AsyncIterator[int]:
    for number in range(count):
        yield number


async def blocks(count: int) -> AsyncIterator[torch.Tensor]:
    for number in range(count):
        yield torch.full((LARGE // 4,), float(number))


def numbers_in_thread(count: int) -> Iterator[int]:
    yield from range(count)


async def use(counter: asyncrpc.RRef[Counter], by: int) -> int:
    """Call a method of a value that is elsewhere, and let go of the reference."""
    return int(await counter.rpc_async().add(by))


async def keep(counter: asyncrpc.RRef[Counter], key: int) -> None:
    KEPT[key] = counter


async def use_kept(key: int, by: int) -> int:
    return int(await KEPT.pop(key).rpc_async().add(by))


async def by_way_of(to: str, value: torch.Tensor) -> torch.Tensor:
    return await asyncrpc.current_worker().peer(to).call(double, value)


# --- what the soak does --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Kind:
    name: str  # for people
    weight: int  # how often it is chosen
    calls: int  # how many calls it makes
    # Does it once; raises if anything is not as it must be.
    run: Callable[[Use], Awaitable[None]]


class Use:
    """One use: who calls, whom, and with what."""

    def __init__(self, worker: Worker, rng: random.Random, serial: int) -> None:
        self.worker = worker
        self.rng = rng
        self.serial = serial
        first, second = rng.sample(["b", "c"], 2)
        self.to: Peer = worker.peer(first)
        self.third: Peer = worker.peer(second)

    def tensor(self, elements: int) -> torch.Tensor:
        return torch.full((elements,), float(self.serial % 1000))


def check(actual: object, expected: object) -> None:
    if actual != expected:
        raise AssertionError(f"{actual!r:.80} is not {expected!r:.80}")


def check_doubled(doubled: torch.Tensor, tensor: torch.Tensor) -> None:
    check((doubled.shape, float(doubled[0])), (tensor.shape, 2 * float(tensor[0])))


async def plain(use: Use) -> None:
    check(await use.to.call(add, use.serial, 1), use.serial + 1)


async def in_thread(use: Use) -> None:
    check(await use.to.call(add_in_thread, use.serial, 1), use.serial + 1)


async def small_tensor(use: Use) -> None:
    tensor = use.tensor(SMALL)
    check_doubled(await use.to.call(double, tensor), tensor)


async def large_tensor(use: Use) -> None:
    tensor = use.tensor(LARGE)
    check_doubled(await use.to.call(double, tensor), tensor)


async def nested_tensor(use: Use) -> None:
    tensor = use.tensor(LARGE // 8)
    result = await use.to.call(by_way_of, use.third.name, tensor)
    check_doubled(result, tensor)


async def error(use: Use) -> None:
    with contextlib.suppress(RemoteError):
        await use.to.call(fail, str(use.serial))
        raise AssertionError("it did not fail")


async def error_of_tensor(use: Use) -> None:
    with contextlib.suppress(RemoteError):
        await use.to.call(fail_in_thread, use.tensor(LARGE // 4))
        raise AssertionError("it did not fail")


async def timeout(use: Use) -> None:
    elements = use.rng.choice([1, LARGE // 4])
    with contextlib.suppress(TimeoutError):  # most often a DeadlineExceededError
        async with asyncrpc.deadline(use.rng.choice([0.0005, 0.005])):
            await use.to.call(sleep_on, use.tensor(elements))
        raise AssertionError("it did not time out")


async def cancel(use: Use) -> None:
    """Cancel a call: at once, in the middle of its request, or while it runs."""
    elements = use.rng.choice([1, LARGE, 2 * LARGE])
    call = asyncio.ensure_future(use.to.call(sleep_on, use.tensor(elements)))
    for _ in range(use.rng.choice([0, 1, 2, 5, 20])):
        await asyncio.sleep(0)
    call.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await call


async def reference(use: Use) -> None:
    counter = use.to.remote(Counter, use.serial)
    check(await counter.rpc_async().add(1), use.serial + 1)
    check((await counter.to_here()).count, use.serial + 1)


async def dropped_reference(use: Use) -> None:
    use.to.remote(Counter, use.serial)


async def shared_reference(use: Use) -> None:
    counter = use.to.remote(Counter, use.serial)
    check(await use.third.call(globals()["use"], counter, 2), use.serial + 2)


async def kept_reference(use: Use) -> None:
    counter = use.to.remote(Counter, use.serial)
    await use.third.call(keep, counter, use.serial)
    del counter
    check(await use.third.call(use_kept, use.serial, 3), use.serial + 3)


async def stream(use: Use) -> None:
    check([number async for number in use.to.stream(numbers, 5)], [0, 1, 2, 3, 4])


async def closed_stream(use: Use) -> None:
    function: Any = use.rng.choice([numbers, numbers_in_thread, blocks])
    items = use.to.stream(function, 1000)
    async with contextlib.aclosing(items):
        for _ in range(use.rng.choice([0, 1, 3])):
            await anext(items)


KINDS: Final = (
    Kind("plain call", 30, 1, plain),
    Kind("call in a thread", 10, 1, in_thread),
    Kind("small tensor", 12, 1, small_tensor),
    Kind("large tensor", 6, 1, large_tensor),
    Kind("nested, with a tensor", 4, 2, nested_tensor),
    Kind("error", 6, 1, error),
    Kind("error of a large request", 2, 1, error_of_tensor),
    Kind("timeout", 5, 1, timeout),
    Kind("cancelled", 6, 1, cancel),
    Kind("reference: made, called, fetched", 5, 3, reference),
    Kind("reference dropped at once", 3, 1, dropped_reference),
    Kind("reference shared", 4, 3, shared_reference),
    Kind("reference kept by a third", 3, 4, kept_reference),
    Kind("stream", 3, 1, stream),
    Kind("stream closed early", 3, 1, closed_stream),
)
