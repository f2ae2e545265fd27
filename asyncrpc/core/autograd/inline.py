"""Decides which work is so short that the loop does it itself.

Handing work to a thread and learning of its end takes as long as a small backward run.
So work that has been short each time that it ran in a thread runs on the loop from then
on, until it takes long.

Work is short if it takes little processor time: on a busy machine the thread may wait
for a core, whatever the work.  Only a long wait counts, as the work itself may be
waiting.  How much is little depends on the machine: on one where the way to a thread
and back takes longer, all else takes longer, too.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Final, TypeVar

from asyncrpc.core.autograd.gradient_lock import GradientLock
from asyncrpc.core.loop.clock import now_s, thread_cpu_s
from asyncrpc.core.loop.threads import uncancelled
from asyncrpc.core.parts import Parts
from asyncrpc.core.torch_modes import with_defaults

T = TypeVar("T")

# The loop must not be held up longer than some small calls take: work that takes less
# than so many ways to a thread and back is short, within these bounds.
SHORT_S: Final = 400e-6
SHORT_MAX_S: Final = 1e-3
WAYS: Final = 5
WAYS_KEPT: Final = 15  # the last ones; their median counts
LONG: Final = 2.5  # times as long as what is short
# From begin to end.  Another process keeps a core for about 3 ms: work whose trial took
# longer may wait for an event.  On the loop, where work must not pay for a busy
# machine, only work that took much longer is taken to wait.
WAIT_S: Final = 6e-3
BLOCKED_S: Final = 50e-3
TRIALS: Final = 3  # in a thread, before the loop does the work
LATE_MAX: Final = 8  # times that the loop was held up; then there are more trials
TRIALS_MAX: Final = 1000
FORGIVEN_AFTER: Final = 100  # short runs on the loop, for each time that it was held up
KINDS_MAX: Final = 1024  # kinds of work that are remembered


# Work is worth a trial if it has at most so many tensors, each of so many elements.
SMALL: Final = 16
SMALL_NUMEL: Final = 1 << 17


class Runner:
    """Runs jobs of one worker that take a lock: on the loop, or in threads.

    Thread safety: none; all calls on the worker's loop.
    """

    def __init__(self, worker: Parts, lock: GradientLock) -> None:
        self._worker = worker
        self._lock = lock
        self._policy = InlinePolicy()

    def may_run_here(self, kind: Hashable | None) -> bool:
        """Return whether `run_here` should run a job at once; it has the lock then.

        Args:
            kind: a key shared by jobs that take about as long; None: no such key.
        """
        return (
            kind is not None
            and self._policy.is_short(kind)
            and not self._worker.pool.runs_here
            and not self._worker.pool.is_exclusive
            and self._lock.acquire(blocking=False)
        )

    @with_defaults
    def run_here(self, kind: Hashable, job: Callable[[], T]) -> T:
        """Run a job that `may_run_here` has just allowed."""
        is_watched = self._policy.is_watched(kind)
        begun_cpu_s = thread_cpu_s() if is_watched else 0.0  # 0.5 us each
        begun_s = now_s()
        try:
            return job()
        except asyncio.CancelledError as error:  # the waiting task was not cancelled
            raise uncancelled(error) from error
        finally:
            self._lock.release()
            took_s = now_s() - begun_s
            cpu_s = thread_cpu_s() - begun_cpu_s if is_watched else None
            self._policy.note(kind, cpu_s, took_s)

    def run_in_thread(
        self, kind: Hashable | None, job: Callable[[], T]
    ) -> asyncio.Future[T]:
        """Run a job in a thread, and note how long it takes there."""
        if kind is None:
            return self._worker.run_in_thread(job)
        cpu_s = took_s = 0.0

        def timed() -> T:
            nonlocal cpu_s, took_s
            begun_s, begun_cpu_s = now_s(), thread_cpu_s()
            try:
                return job()
            finally:
                cpu_s, took_s = thread_cpu_s() - begun_cpu_s, now_s() - begun_s

        def note(_: asyncio.Future[T]) -> None:
            self._policy.note(kind, cpu_s, took_s)
            self._policy.note_way(now_s() - sent_s - took_s)

        sent_s = now_s()
        work = self._worker.run_in_thread(timed)
        work.add_done_callback(note)
        return work


@dataclass(slots=True)
class _Pace:
    """The record of one kind of work.

    Attributes:
        trials: short trials in a row.
        needed: trials that must be short before the loop does the work.
        late: how often the loop was held up recently.
        short: runs on the loop since then, all short.
        is_watched: whether processor time is also measured on the loop.
    """

    trials: int = 0
    needed: int = TRIALS
    late: int = 0
    short: int = 0
    is_watched: bool = False


class InlinePolicy:
    """How long each kind of work takes, as far as is known.

    Attributes:
        short_s: what takes at most so long is short; `LONG` times that is long.

    Thread safety: none; all calls on the worker's loop.
    """

    def __init__(self) -> None:
        self.short_s = SHORT_S
        self._paces: OrderedDict[Hashable, _Pace] = OrderedDict()
        self._ways_s: deque[float] = deque(maxlen=WAYS_KEPT)

    def is_short(self, kind: Hashable) -> bool:
        """Return whether work of this kind has always been short."""
        pace = self._paces.get(kind)
        return pace is not None and pace.trials >= pace.needed

    def is_watched(self, kind: Hashable) -> bool:
        """Return whether the next run on the loop must measure its processor time.

        Work that was over in less than is long cannot have taken more processor time.
        """
        pace = self._paces.get(kind)
        return pace is not None and pace.is_watched

    def note(self, kind: Hashable, cpu_s: float | None, took_s: float) -> None:
        """Record how long work of this kind took.

        Args:
            cpu_s: processor time of its thread; None for a run on the loop without a
                measurement.
        """
        pace = self._paces.get(kind)
        if pace is None:
            pace = self._paces[kind] = _Pace()
            if len(self._paces) > KINDS_MAX:
                self._paces.popitem(last=False)
        if pace.trials < pace.needed:
            is_short = (cpu_s or 0.0) <= self.short_s and took_s <= WAIT_S
            pace.trials = pace.trials + 1 if is_short else 0
            return
        long_s = LONG * self.short_s
        is_unclear = cpu_s is None and long_s < took_s <= BLOCKED_S
        pace.is_watched = is_unclear
        if is_unclear:
            return
        if took_s > BLOCKED_S or (cpu_s or 0.0) > long_s:
            pace.trials, pace.short = 0, 0
            pace.late += 1
            if pace.late >= LATE_MAX:
                pace.late, pace.needed = 0, TRIALS_MAX
        elif pace.late:
            pace.short += 1
            if pace.short >= FORGIVEN_AFTER:
                pace.late, pace.short = pace.late - 1, 0

    def note_way(self, took_s: float) -> None:
        """Record how long it took to hand work to a thread and to learn of its end."""
        self._ways_s.append(took_s)
        way_s = sorted(self._ways_s)[len(self._ways_s) // 2]
        self.short_s = min(max(SHORT_S, WAYS * way_s), SHORT_MAX_S)
