"""Work on tensors: in a thread, to its end, where it would hold up the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

ON_LOOP_BYTES: Final = 1 << 18  # copying them takes 0.1 ms, as long as a thread takes


class Threads(Protocol):
    """The threads of a worker, which may use its devices."""

    def run_in_thread(self, job: Callable[[], T]) -> asyncio.Future[T]:
        """Run a function in one of them; the future holds its result."""


def user_of(threads: Threads, tensors: Iterable[torch.Tensor]) -> Threads | None:
    """Return the threads that may use tensors; None: any thread, and the loop."""
    return None if all(tensor.is_cpu for tensor in tensors) else threads


async def run_beside(
    job: Callable[[], T], nbytes: int, threads: Threads | None = None
) -> T:
    """Run `job`, which copies so many bytes, in a thread if they are many."""
    if threads is None and nbytes <= ON_LOOP_BYTES:
        return job()
    return await in_thread(job, threads)


async def in_thread(job: Callable[[], T], threads: Threads | None = None) -> T:
    """Run `job` in a thread; when this ends, it has ended.

    Args:
        threads: threads that may use the devices of the tensors; None: no tensor is on
            a device.
    """
    if threads is None:
        return await to_its_end(asyncio.ensure_future(asyncio.to_thread(job)))
    context = contextvars.copy_context()  # as `to_thread` does
    return await to_its_end(threads.run_in_thread(lambda: context.run(job)))


async def to_its_end(
    running: asyncio.Future[T], on_cancel: Callable[[], None] | None = None
) -> T:
    """Wait for a function in a thread; when this ends, the function has ended."""
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        if on_cancel is not None:
            on_cancel()
        while not running.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([running])
        if not running.cancelled():
            running.exception()  # marks it as read
        raise
