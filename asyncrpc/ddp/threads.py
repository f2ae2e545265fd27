"""Work on tensors: in a thread, to its end, where it would hold up the event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final, TypeVar

T = TypeVar("T")

ON_LOOP_BYTES: Final = 1 << 18  # to copy them takes 0.1 ms, as long as a thread takes


async def run_beside(job: Callable[[], T], nbytes: int) -> T:
    """Run `job`, which copies so many bytes, in a thread if they are many.

    Raises:
        Exception: what `job` raises.

    Cancellation:
        See `in_thread`.
    """
    return job() if nbytes <= ON_LOOP_BYTES else await in_thread(job)


async def in_thread(job: Callable[[], T]) -> T:
    """Run `job` in a thread of the event loop; when this ends, it has ended.

    Raises:
        Exception: what `job` raises.

    Cancellation:
        See `to_its_end`.
    """
    return await to_its_end(asyncio.ensure_future(asyncio.to_thread(job)))


async def to_its_end(
    running: asyncio.Future[T], on_cancel: Callable[[], None] | None = None
) -> T:
    """Wait for what runs in a thread; when this ends, it has ended.

    Args:
        running: it.
        on_cancel: called first if this is cancelled.

    Raises:
        Exception: what it raises.

    Cancellation:
        It waits until `running` has ended, which writes to tensors that others use
        next.
    """
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        if on_cancel is not None:
            on_cancel()
        while not running.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([running])
        if not running.cancelled():
            running.exception()  # which nobody else is going to ask for
        raise
