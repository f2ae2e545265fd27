"""Tasks whose first step runs at once: those of Python 3.12, also for Python 3.11.

A coroutine that ends without waiting then costs 2.0 us, not the 4.8 us of a task that
uvloop schedules, and no turn of the loop.  It is a real task all the same: the function
may ask for `asyncio.current_task()`, and use `asyncio.timeout`, before it first waits.
"""

from __future__ import annotations

import asyncio
import contextvars
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def eager_task(
    loop: asyncio.AbstractEventLoop,
    coroutine: Coroutine[Any, Any, T],
    context: contextvars.Context,
) -> asyncio.Task[T]:
    """Return a task of `coroutine` that has run until it first waits, or to its end.

    Called on the loop.  Inside another task, whose step cannot be interrupted by
    another's, the first step is scheduled as usual.
    """
    if asyncio.current_task(loop) is not None:
        return loop.create_task(coroutine, context=context)
    if sys.version_info >= (3, 12):
        return asyncio.Task(coroutine, loop=loop, context=context, eager_start=True)
    return _step_at_once(loop, coroutine, context)


def _step_at_once(
    loop: asyncio.AbstractEventLoop,
    coroutine: Coroutine[Any, Any, T],
    own: contextvars.Context,
) -> asyncio.Task[T]:
    """Make a task, and run the step that it wants its loop to run soon.

    The loop's `call_soon` is hidden behind ours while the task is made.  Other threads
    use `call_soon_threadsafe`; but finalizers may call it, for the collector may run at
    any allocation.  Their calls do not have the context `own`, and are passed on.
    """
    steps: list[Callable[[], object]] = []
    call_soon = loop.call_soon

    def take(
        step: Callable[..., object],
        *args: object,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle | None:
        if context is own and not steps:
            steps.append(step)
            return None
        return call_soon(step, *args, context=context)

    loop.call_soon = take  # type: ignore[method-assign, assignment]
    try:
        task = asyncio.Task(coroutine, loop=loop, context=own)
    finally:
        del loop.call_soon
    own.run(steps[0])
    return task
