"""An event loop whose time is virtual: it never sleeps, it jumps to the next timer.

Under it the whole of asyncio runs unchanged: `sleep`, `timeout`, tasks, locks.  A run
is a function of its inputs alone, so a seed and a commit reproduce it; an hour of
timers takes milliseconds; and when all tasks wait for events that can never happen, the
loop raises an error that names them, where a real loop would hang.

There is one thread.  Jobs of executors run at once, in place; `call_soon_threadsafe`
works from the loop's own thread and is refused from any other, because the moment at
which another thread acts is not a function of the inputs.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable
from typing import Any

# Workers that wait only for each other's heartbeats would do so forever.
LIMIT_S = 6 * 3600.0


class DeadlockError(Exception):
    """Tasks wait, no timer is set and nothing is ready: no event can ever happen.

    Or hours of virtual time have passed, which only happens if a task waits for
    something that never comes while heartbeats go on.

    Attributes:
        stuck: each waiting task, with its current line.
    """

    def __init__(self, stuck: list[str]) -> None:
        self.stuck = stuck
        waiting = "; ".join(stuck) or "nothing but the caller of run_forever"
        super().__init__(f"no timer is set and these wait: {waiting}")


class SimTask(asyncio.Task[Any]):
    """A task whose order in sets does not depend on its address: asyncio uses sets."""

    def __init__(self, coroutine: Any, *, serial: int, **kwargs: Any) -> None:
        self._serial = serial
        super().__init__(coroutine, **kwargs)

    def __hash__(self) -> int:
        return self._serial

    def __eq__(self, other: object) -> bool:
        return self is other


class SimLoop(asyncio.BaseEventLoop):
    """The loop; use it as `asyncio.Runner(loop_factory=SimLoop)`.

    Attributes:
        limit_s: virtual seconds after which a run counts as stuck.
    """

    def __init__(self) -> None:
        super().__init__()
        self.limit_s = LIMIT_S
        self._now_s = 0.0
        self._home = threading.get_ident()
        self._selector = self  # BaseEventLoop waits in self._selector.select(timeout)
        self._serials = itertools.count()
        self.set_task_factory(self._make_task)

    def time(self) -> float:
        """Return the virtual time, in seconds since the loop was made."""
        return self._now_s

    def select(self, timeout: float | None) -> list[object]:
        """Jump to the next timer instead of waiting for it."""
        if timeout is None:
            tasks = asyncio.all_tasks(self)
            raise DeadlockError(sorted(describe_task(task) for task in tasks))
        self._now_s += timeout
        if self._now_s > self.limit_s:
            tasks = asyncio.all_tasks(self)
            raise DeadlockError(sorted(describe_task(task) for task in tasks))
        return []

    def run_in_executor(  # type: ignore[override]  # BaseEventLoop's is a coroutine
        self, executor: object, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Run `func` here and now: a simulation has one thread."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as exc:  # noqa: BLE001  (it belongs to the task that awaits)
            future.set_exception(exc)
        return future

    def _make_task(
        self, _loop: asyncio.AbstractEventLoop, coroutine: Any, **kwargs: Any
    ) -> asyncio.Task[Any]:
        return SimTask(coroutine, loop=self, serial=next(self._serials), **kwargs)

    def _process_events(self, event_list: list[object]) -> None:
        assert not event_list

    def _write_to_self(self) -> None:
        if threading.get_ident() != self._home:
            raise RuntimeError(
                f"thread {threading.current_thread().name!r} woke a simulated loop, "
                f"which is not deterministic; run that work on the loop"
            )


def describe_task(task: asyncio.Task[Any]) -> str:
    """Name a task and the line of the innermost frame at which it waits."""
    frames = task.get_stack()
    if not frames:
        return task.get_name()
    code = frames[-1].f_code
    place = f"{code.co_filename}:{frames[-1].f_lineno}"
    return f"{task.get_name()} in {code.co_qualname} ({place})"
