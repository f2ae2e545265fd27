"""Work on tensors: in a thread, to its end, where it would hold up the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    import torch

    from asyncrpc.runtime.parts import Parts

T = TypeVar("T")

ON_LOOP_BYTES: Final = 1 << 18  # to copy them takes 0.1 ms, as long as a thread takes


def user_of(worker: Parts, tensors: Iterable[torch.Tensor]) -> Parts | None:
    """Return in whose threads tensors may be used; None: in any, and on the loop."""
    return None if all(one.is_cpu for one in tensors) else worker


async def run_beside(
    job: Callable[[], T], nbytes: int, worker: Parts | None = None
) -> T:
    """Run `job`, which copies so many bytes, in a thread if they are many.

    Args:
        job: what to do.
        nbytes: that it copies.
        worker: see `in_thread`.

    Raises:
        Exception: what `job` raises.

    Cancellation:
        See `in_thread`.
    """
    if worker is None and nbytes <= ON_LOOP_BYTES:
        return job()
    return await in_thread(job, worker)


async def in_thread(job: Callable[[], T], worker: Parts | None = None) -> T:
    """Run `job` in a thread; when this ends, it has ended.

    Args:
        job: what to do.
        worker: whose devices it uses, which may be left to its threads; None: of none.

    Raises:
        Exception: what `job` raises.

    Cancellation:
        See `to_its_end`.
    """
    if worker is None:
        return await to_its_end(asyncio.ensure_future(asyncio.to_thread(job)))
    context = contextvars.copy_context()  # as `to_thread` does
    return await to_its_end(worker.run_in_thread(lambda: context.run(job)))


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
            running.exception()  # marks it as read
        raise
