"""Devices: CUDA, XLA and TPU behind one interface.

Tensors on devices travel in calls as any others do, see `docs/how-to/devices.md`.  Here
is what a program needs beside that: a thread in which devices may be used, and PJRT's
runtime in `asyncrpc.devices.xla`.
"""

from __future__ import annotations

import contextvars
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, ParamSpec, TypeVar

from asyncrpc.runtime.calls.context import current_worker
from asyncrpc.runtime.devices.names import DeviceName
from asyncrpc.runtime.devices.turns import turn

P = ParamSpec("P")
T = TypeVar("T")

__all__ = ["DeviceName", "run", "turn"]


async def run(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a function in a thread of the current worker, where devices may be used.

    On a worker with XLA devices there is one such thread at a time, which runs copies,
    backward passes and plain functions of calls, too.  A coroutine that computes on
    such a device does it so.

    Args:
        function: not a coroutine function.
        *args: its arguments.
        **kwargs: likewise.

    Returns:
        What it returned.

    Raises:
        NotStartedError: there is no current worker.
        Exception: what `function` raised.

    Cancellation:
        The function runs to its end, and what it returns is dropped.

    Example:
        >>> loss = await asyncrpc.devices.run(step, model, batch)

    Source: asyncio.to_thread.
    """
    context = contextvars.copy_context()
    job: Callable[[], Any] = partial(context.run, function, *args, **kwargs)
    running: Awaitable[T] = current_worker().run_in_thread(job)
    return await running
