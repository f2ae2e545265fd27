"""What the tests of this folder run on the worker behind the application."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from asyncrpc.errors import Outcome, OverloadedError, RejectedError


@dataclass
class Watch:
    """Whether a coroutine that waits for ever has begun, and has been cancelled.

    Attributes:
        begun: it has.
        cancelled: it has been, or its generator was closed.
        produced: items of `produce`, by the name of who asked.
    """

    begun: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    produced: Counter[str] = field(default_factory=Counter)


watches: dict[str, Watch] = {}  # by test: the workers of a test share its process


async def wait_forever(name: str) -> None:
    watch = watches[name]
    watch.begun.set()
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        watch.cancelled.set()
        raise


async def double(numbers: list[int]) -> list[int]:
    return [2 * number for number in numbers]


async def refuse() -> None:
    raise RejectedError("busy", outcome=Outcome.NOT_EXECUTED)


async def overload() -> None:
    raise OverloadedError("32 items wait", retry_after_s=7.2)


async def time_out() -> None:
    raise TimeoutError("of its own")


async def fail() -> None:
    raise ValueError("no luck")


# --- streams -------------------------------------------------------------------------


async def count_to(number: int) -> AsyncIterator[int]:
    for value in range(number):
        yield value


async def give_and_wait(name: str, *items: str) -> AsyncIterator[str]:
    """Yield some items, then none; note when it is closed."""
    watch = watches[name]
    try:
        for item in items:
            yield item
        watch.begun.set()
        await asyncio.Event().wait()
    finally:
        watch.cancelled.set()


async def give_and_refuse(*items: str) -> AsyncIterator[str]:
    for item in items:
        yield item
    raise OverloadedError("32 items wait", retry_after_s=7.2)


async def give_and_fail(*items: str) -> AsyncIterator[str]:
    for item in items:
        yield item
    raise ValueError("no luck")


async def produce(name: str, who: str, length: int) -> AsyncIterator[str]:
    """Yield text of a length for ever, and count it."""
    watch = watches[name]
    try:
        while True:
            watch.produced[who] += 1
            yield "x" * length
    finally:
        watch.produced[f"{who} ended"] += 1
        if who == "slow":
            watch.cancelled.set()
