"""What the tests of this folder run on the worker behind the application."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from asyncrpc.errors import Outcome, OverloadedError, RejectedError


@dataclass
class Watch:
    """Whether a coroutine that waits for ever has begun, and has been cancelled."""

    begun: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)


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
