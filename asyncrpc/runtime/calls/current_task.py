"""The current task or thread, by name, for events; read at the start of every call."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from typing import Any

from asyncrpc.runtime.calls.context import current_call_var

if sys.version_info >= (3, 12):
    _current_task = asyncio.current_task
else:
    # Before 3.12 it is written in Python; a look into its table takes a third of the
    # time.
    _current_task: Callable[[Any], asyncio.Task[Any] | None] = (
        asyncio.tasks._current_tasks.get  # type: ignore[attr-defined]  # noqa: SLF001
    )


def task_here(loop: asyncio.AbstractEventLoop) -> str:
    """Return the call that is served here, or the name of the running task.

    All tasks of a function that a caller runs here count as the call: a function that
    gathers others is seen with them.

    Args:
        loop: of the worker; this is its thread.

    Returns:
        The label of the call, a name, or an empty string if this runs in no task.
    """
    call = current_call_var.get()
    if call is not None and call.is_running:
        return call.label
    task = _current_task(loop)
    return "" if task is None else task.get_name()


def thread_here() -> str:
    """Return the call that this thread serves, or its name; it runs no loop."""
    call = current_call_var.get()
    if call is not None and call.is_running:
        return call.label
    return threading.current_thread().name
