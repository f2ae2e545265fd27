"""How long each task has waited for the same thing.

A task shows what it waits for, but not since when.  So the loop samples the tasks from
time to time, and compares the future that a task waits for with that of the last
sample.  The ages are right to within the time between two samples.
"""

from __future__ import annotations

import asyncio
import weakref
from typing import Any, Final

SAMPLE_S: Final = 2.0
LOOKS: Final = 4  # of the watch for stalls, in the time that a wait may take
SHARE_MAX: Final = 0.002  # of the loop's time; with very many tasks it looks less often


class WaitAges:
    """When the tasks of one event loop began to wait.

    Attributes:
        tasks: how many there were at the last look.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, *, sample_s: float = SAMPLE_S
    ) -> None:
        self._loop = loop
        self._sample_s = sample_s
        self.tasks = 0
        # By id of the task: what it waits for, and since when.
        self._known: dict[int, tuple[weakref.ref[Any], float]] = {}
        self._timer: asyncio.TimerHandle | asyncio.Handle | None = None

    def start(self) -> None:
        """Look at the tasks from now on; called on the loop."""
        self._timer = self._loop.call_later(self._sample_s, self._tick)

    def stop(self) -> None:
        """Stop sampling."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        begun_s = self._loop.time()
        self.sample()
        took_s = self._loop.time() - begun_s
        pause_s = max(self._sample_s, took_s / SHARE_MAX)
        self._timer = self._loop.call_later(pause_s, self._tick)

    def sample(self) -> None:
        """Look at all tasks now."""
        now_s, before = self._loop.time(), self._known
        known: dict[int, tuple[weakref.ref[Any], float]] = {}
        tasks = asyncio.all_tasks(self._loop)
        self.tasks = len(tasks)
        for task in tasks:
            waiter = _waiter_of(task)
            if waiter is None:
                continue
            watched = before.get(id(task))
            is_same = watched is not None and watched[0]() is waiter
            if is_same and watched is not None:
                known[id(task)] = watched
            else:
                try:
                    known[id(task)] = weakref.ref(waiter), now_s
                except (
                    TypeError
                ):  # a future of another library, which cannot be watched
                    continue
        self._known = known

    def age_s(self, task: asyncio.Task[Any]) -> float:
        """Return how long a task has been in its current wait; 0: not long.

        Thread safety: from any thread.
        """
        watched, waiter = self._known.get(id(task)), _waiter_of(task)
        if watched is None or waiter is None or watched[0]() is not waiter:
            return 0.0
        return max(0.0, self._loop.time() - watched[1])

    def overdue(self, after_s: float) -> set[tuple[int, float]]:
        """Return the waits that had lasted for so many seconds at the last look.

        Each is the id of its task and the time at which the wait began: a later wait of
        the same task is another one.

        Thread safety: from any thread.
        """
        before_s = self._loop.time() - after_s
        return {
            (task_id, since_s)
            for task_id, (
                _,
                since_s,
            ) in self._known.items()  # never changed, only replaced
            if since_s <= before_s
        }


def _waiter_of(task: asyncio.Task[Any]) -> Any:
    return getattr(task, "_fut_waiter", None)
