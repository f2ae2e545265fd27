"""Which work is so short that the loop does it itself.

Handing work to a thread and learning of its end takes as long as a small backward run.
So work that has been short, each time that it ran in a thread, runs on the loop from
then on; once it takes long, it does not.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Final, TypeVar

from asyncrpc.autograd.ports import Threads
from asyncrpc.clock import now_s
from asyncrpc.runtime.threads import uncancelled

T = TypeVar("T")

# The loop is not to be held up longer than a few small calls take.
SHORT_S: Final = 400e-6
LONG_S: Final = 1e-3
TRIALS: Final = 3  # in a thread, before the loop does it
LATE_MAX: Final = 8  # that the loop was held up, before it never does it again
KINDS_MAX: Final = 1024  # that are remembered
_NEVER: Final = -1


# What is worth a trial: of so many tensors at most, and each of so many elements.
SMALL: Final = 16
SMALL_NUMEL: Final = 1 << 17


class Runner:
    """Runs jobs of one worker that take a lock: on the loop, or in threads.

    Thread safety: none; all calls on the worker's loop.
    """

    def __init__(self, threads: Threads, lock: threading.RLock) -> None:
        self._threads = threads
        self._lock = lock
        self._policy = InlinePolicy()

    def may_run_here(self, kind: Hashable | None) -> bool:
        """Return whether `run_here` should run a job at once; it has the lock then.

        Args:
            kind: a key shared by jobs that take about as long; None if there is none.
        """
        return (
            kind is not None
            and self._policy.is_short(kind)
            and not self._threads.pool.runs_here
            and not self._threads.pool.is_exclusive
            and self._lock.acquire(blocking=False)
        )

    def run_here(self, kind: Hashable, job: Callable[[], T]) -> T:
        """Run a job that `may_run_here` has just allowed."""
        begun_s = now_s()
        try:
            return job()
        except asyncio.CancelledError as error:  # who awaits this has not been
            raise uncancelled(error) from error
        finally:
            self._lock.release()
            self._policy.note(kind, now_s() - begun_s)

    def run_in_thread(
        self, kind: Hashable | None, job: Callable[[], T]
    ) -> asyncio.Future[T]:
        """Run a job in a thread, and take note of how long it takes there."""
        if kind is None:
            return self._threads.run_in_thread(job)
        took_s = 0.0

        def timed() -> T:
            nonlocal took_s
            begun_s = now_s()
            try:
                return job()
            finally:
                took_s = now_s() - begun_s

        work = self._threads.run_in_thread(timed)
        work.add_done_callback(lambda _: self._policy.note(kind, took_s))
        return work


class InlinePolicy:
    """How long each kind of work takes, as far as is known.

    Thread safety: none; all calls on the worker's loop.
    """

    def __init__(self) -> None:
        self._short: OrderedDict[Hashable, int] = OrderedDict()  # trials in a row
        self._late: dict[Hashable, int] = {}  # how often the loop was held up

    def is_short(self, kind: Hashable) -> bool:
        """Return whether work of this kind has always been short."""
        return self._short.get(kind, 0) >= TRIALS

    def note(self, kind: Hashable, took_s: float) -> None:
        """Record how long work of this kind took."""
        trials = self._short.get(kind, 0)
        if trials == _NEVER:
            return
        if trials < TRIALS:
            # A thread may have to wait for its turn: slow is only what always is.
            trials = trials + 1 if took_s <= SHORT_S else 0
        elif took_s > LONG_S:
            # Or another process had the core: so it begins anew, some times.
            self._late[kind] = late = self._late.get(kind, 0) + 1
            trials = _NEVER if late >= LATE_MAX else 0
        self._short[kind] = trials
        if len(self._short) > KINDS_MAX:
            old, _ = self._short.popitem(last=False)
            self._late.pop(old, None)
