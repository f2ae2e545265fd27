"""Devices: CUDA, XLA and TPU behind one interface.

Tensors on devices travel in calls as any others do, see `docs/how-to/devices.md`.  This
package has what else a program needs: a thread in which devices may be used, and PJRT's
runtime in `asyncrpc.parallel.xla.runtime`.
"""

from __future__ import annotations

import contextvars
import inspect
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, ParamSpec, TypeVar

from asyncrpc.core.arguments import check_callable, wrong
from asyncrpc.core.devices.device_lock import lock
from asyncrpc.core.devices.names import DeviceName
from asyncrpc.core.worker import current_worker

P = ParamSpec("P")
T = TypeVar("T")

__all__ = ["DeviceName", "lock", "run"]


async def run(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a function in a thread of the current worker, where devices may be used.

    On a worker with XLA devices there is one such thread at a time, which also runs
    copies, backward passes and plain functions of calls.  A coroutine must compute on
    such a device by this function.

    Args:
        function: not a coroutine function.
        *args: its positional arguments.
        **kwargs: its keyword arguments.

    Returns:
        The result of `function`.

    Raises:
        NotStartedError: there is no current worker.
        UsageError: `function` cannot be called, or is a coroutine function; or this is
            not the event loop of the current worker.
        Exception: the error of `function`.

    Cancellation:
        The function runs to its end, and its result is dropped.

    Example:
        >>> loss = await asyncrpc.devices.run(step, model, batch)

    Source: asyncio.to_thread.
    """
    worker = current_worker().parts
    worker.check_on_loop("devices.run")
    check_callable("function", function)
    if inspect.iscoroutinefunction(function):
        wanted = "a plain function, because it runs in a thread"
        raise wrong("function", wanted, function)
    context = contextvars.copy_context()
    job: Callable[[], Any] = partial(context.run, function, *args, **kwargs)
    running: Awaitable[T] = worker.run_in_thread(job)
    return await running
