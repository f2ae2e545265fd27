"""Which task runs, for events: asked at the beginning of every call."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from typing import Any

from asyncrpc.runtime.calls.context import current_call_var

if sys.version_info >= (3, 12):
    current_task = asyncio.current_task
else:
    # There it is a function of Python's; what it looks into takes a third of the time.
    current_task: Callable[[Any], asyncio.Task[Any] | None] = (
        asyncio.tasks._current_tasks.get  # type: ignore[attr-defined]  # noqa: SLF001
    )


def name_of_task(loop: asyncio.AbstractEventLoop) -> str:
    """Return the name of the task that runs on a loop; empty if none does.

    Called in the thread of the loop.
    """
    task = current_task(loop)
    return "" if task is None else task.get_name()


def name_of_thread() -> str:
    """Return the call that this thread, which runs no loop, serves; or its own name."""
    call = current_call_var.get()
    return threading.current_thread().name if call is None else call.label
