"""Completes futures in threads: their callbacks may make calls, and block.

Futures are completed one after the other by one thread, in the order in which their
calls have ended.  A callback of the program may block in that thread, and even wait for
a later future: so if a job has waited for two ticks, another thread takes part.  If
many calls end together this takes 5 us of processor time for each; a thread for each
would take 16.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from typing import Final

from asyncrpc.core.loop.threads import Job, Submit, start_thread
from asyncrpc.errors import AsyncRpcError, ClosedError

TICK_S: Final = 0.002


class Completions:
    """Runs short jobs, which complete futures, in as few threads as they need."""

    def __init__(self, submit: Submit, loop: asyncio.AbstractEventLoop) -> None:
        self._submit = submit
        self._loop = loop
        self._jobs: deque[Job] = deque()
        self._job_count = 0  # number of jobs so far
        self._job_count_before = 0  # at the last tick
        self._threads = 0  # threads of the pool that work on them
        self._is_starting = False  # one more thread; the pool may have no free one
        self._timer: asyncio.TimerHandle | None = None

    def run(self, job: Job) -> None:
        """Run a job in a thread; on the loop."""
        self._jobs.append(job)
        self._job_count += 1
        if not self._threads:
            self._start()
        if self._timer is None:
            self._job_count_before = 0
            self._timer = self._loop.call_later(TICK_S, self._on_tick)

    def finish(self) -> None:
        """Run the remaining jobs in a separate thread, as the loop has ended."""
        if self._jobs:
            self._work_apart()

    def _start(self) -> None:
        """Start one more thread."""
        self._is_starting = True
        try:
            self._submit(self._work, self._ended)
        except AsyncRpcError:  # the worker is ending, but a thread may be waiting
            self._work_apart()
        else:
            self._threads += 1

    def _work(self) -> None:
        self._is_starting = False
        jobs = self._jobs
        while True:
            try:
                job = jobs.popleft()
            except IndexError:
                return
            job()

    def _work_apart(self) -> None:
        start_thread(threading.Thread(target=self._work, daemon=True))

    def _ended(self, _result: object, error: BaseException | None) -> None:
        self._threads -= 1
        if issubclass(type(error), ClosedError):  # the job never ran
            self._work_apart()
        elif self._jobs and not self._threads:
            self._start()

    def _on_tick(self) -> None:
        """Start one more thread if a job has waited since the last tick."""
        waiting = len(self._jobs)
        if not waiting:
            self._timer = None
            return
        if self._job_count - waiting < self._job_count_before and not self._is_starting:
            self._start()
        self._job_count_before = self._job_count
        self._timer = self._loop.call_later(TICK_S, self._on_tick)
