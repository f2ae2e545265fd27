"""A script of calls that uses every kind of frame, and counts what ran.

Both workers are in this process, so that what ran can be asked of a dictionary: each
call has a number of its own, on whichever worker it runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final

import torch

from asyncrpc import RRef, Worker

ELEMENTS: Final = 1 << 18  # 1 MiB: over lanes if there are any, else in chunks
STREAM: Final = 6

ran: Counter[int] = Counter()
cancelled: dict[int, asyncio.Event] = {}
_numbers = itertools.count(1)


async def run(call: int) -> int:
    ran[call] += 1
    return call


def run_plain(call: int) -> int:
    ran[call] += 1
    return call


def double(call: int, value: torch.Tensor) -> torch.Tensor:
    ran[call] += 1
    return value * 2


async def count_to(call: int, end: int) -> AsyncIterator[torch.Tensor]:
    """Yield small and large tensors in turn."""
    ran[call] += 1
    for number in range(end):
        yield torch.full((1 << 15 if number % 2 else 4,), float(number))


async def wait_for_ever(call: int) -> None:
    ran[call] += 1
    try:
        await asyncio.Event().wait()
    finally:
        cancelled[call].set()


class Box:
    """What references refer to."""

    def __init__(self, call: int) -> None:
        ran[call] += 1
        self.calls: list[int] = []

    def add(self, call: int) -> int:
        ran[call] += 1
        self.calls.append(call)
        return len(self.calls)


async def add_through(call: int, rref: RRef[Box], inner: int) -> int:
    ran[call] += 1
    return int(await rref.rpc_async().add(inner))


def back_from(call: int, rref: RRef[Box]) -> RRef[Box]:
    ran[call] += 1
    return rref


class Calls:
    """The numbers of the calls that were made, each of which must run once."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def new(self) -> int:
        number = next(_numbers)
        self.numbers.append(number)
        return number

    def forgive(self, number: int) -> None:
        """Let a call run once or not at all: it was cancelled."""
        self.numbers.remove(number)
        assert ran[number] <= 1

    def check(self) -> None:
        """Assert that each ran exactly once."""
        assert {call: ran[call] for call in self.numbers if ran[call] != 1} == {}


async def play(a: Worker, b: Worker) -> Calls:
    """Use the link between two workers in every way; all of it must succeed."""
    calls = Calls()
    await asyncio.gather(*small_calls(a, b, calls))
    await asyncio.gather(large_calls(a, b, calls), read_stream(b, a, calls))
    await asyncio.gather(references(a, b, calls), read_stream(a, b, calls))
    await asyncio.gather(cancel(a, b, calls), cancel(b, a, calls))
    calls.check()
    return calls


def small_calls(a: Worker, b: Worker, calls: Calls) -> Iterator[Any]:
    for caller, other in ((a, b), (b, a), (a, b)):
        for function in (run, run_plain):
            yield expect_number(caller, other, function, calls)


async def expect_number(
    caller: Worker, other: Worker, function: Any, calls: Calls
) -> None:
    number = calls.new()
    assert await caller.peer(other.name).call(function, number) == number


async def large_calls(a: Worker, b: Worker, calls: Calls) -> None:
    for caller, other in ((a, b), (b, a)):
        number = calls.new()
        value = torch.full((ELEMENTS,), float(number))
        result = await caller.peer(other.name).call(double, number, value)
        assert torch.equal(result, value * 2)


async def read_stream(caller: Worker, other: Worker, calls: Calls) -> None:
    seen = [
        float(item[0])
        async for item in caller.peer(other.name).stream(count_to, calls.new(), STREAM)
    ]
    assert seen == [float(number) for number in range(STREAM)]


async def references(a: Worker, b: Worker, calls: Calls) -> None:
    """A value of b: made and used by a, passed to its owner and back."""
    rref = a.peer(b.name).remote(Box, calls.new())
    assert await rref.rpc_async().add(calls.new()) == 1
    peer = a.peer(b.name)
    assert await peer.call(add_through, calls.new(), rref, calls.new()) == 2
    again: RRef[Box] = await peer.call(back_from, calls.new(), rref)
    assert (await again.to_here()).calls == (await rref.to_here()).calls


async def cancel(caller: Worker, other: Worker, calls: Calls) -> None:
    """Cancel a call: if it began, it is cancelled, once."""
    number = calls.new()
    cancelled[number] = asyncio.Event()
    task = asyncio.create_task(caller.peer(other.name).call(wait_for_ever, number))
    await caller.peer(other.name).call(run, calls.new())  # the other was sent before it
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    if ran[number]:
        await cancelled[number].wait()
    calls.forgive(number)
    del cancelled[number]
