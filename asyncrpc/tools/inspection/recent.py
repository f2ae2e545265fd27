"""Takes what a worker remembers from its flight recorder."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, Final

from asyncrpc.core.loop.clock import wall_ns
from asyncrpc.errors import UsageError
from asyncrpc.tools.inspection.events import (
    KIND_NAMES,
    NamedTask,
    RecentEvents,
    is_own,
)
from asyncrpc.trace import RECENT_MAX, FlightRecorder

TASKS_MAX: Final = 1000  # that are named; a timeline has far fewer tracks


def recent_events(
    recorder: FlightRecorder,
    loop: asyncio.AbstractEventLoop,
    kinds: Sequence[str] = (),
    newest_max: int = RECENT_MAX,
) -> RecentEvents:
    """Return what a worker remembers.

    Args:
        kinds: fields of `RecentEvents`; empty: all.
        newest_max: events of each kind, the newest; calls that look at the worker are
            left out.

    Thread safety: from any thread.
    """
    unknown = [kind for kind in kinds if kind not in KIND_NAMES]
    if unknown:
        raise UsageError(
            f"unknown kind of event {unknown[0]!r}; use one of {', '.join(KIND_NAMES)}"
        )
    wanted = kinds or KIND_NAMES
    events = {
        name: [event for event in getattr(recorder, name).recent if not is_own(event)][
            -newest_max:
        ]
        if name in wanted
        else []
        for name in KIND_NAMES
    }
    tasks = _tasks_of(loop, events.values())
    return RecentEvents(recorder.now_s(), wall_ns(), tasks, **events)


def _tasks_of(
    loop: asyncio.AbstractEventLoop, kinds: Iterable[Iterable[Any]]
) -> list[NamedTask]:
    """Return the running tasks that events name, and their coroutines."""
    named = {getattr(event, "task", "") for events in kinds for event in events}
    running = (task for task in asyncio.all_tasks(loop) if task.get_name() in named)
    return [
        NamedTask(task.get_name(), _coroutine_of(task))
        for task in islice(running, TASKS_MAX)
    ]


def _coroutine_of(task: asyncio.Task[Any]) -> str:
    # A coroutine of a class from elsewhere may have no name.
    name = getattr(task.get_coro(), "__qualname__", "")
    return name if type(name) is str else ""
