"""Samples how late an event loop and threads get to run, four times a second.

A thread sleeps.  The time by which it wakes up late is the lag of threads: another
thread held the interpreter's lock, or no core was free.  Then it schedules a callback
on the loop; the time until that runs is the lag of the loop.  The next callback is
scheduled only after this one has run, so a blocked loop holds one callback at most.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Final

from asyncrpc.core.loop.clock import Clock

INTERVAL_S: Final = 0.25

_now_s: Final = Clock().now_s


class LagSampler:
    """A thread that takes samples until it is ended."""

    def __init__(
        self,
        name: str,
        loop_of: Callable[[], asyncio.AbstractEventLoop | None],
        on_loop_lag: Callable[[float], None],
        on_gil_lag: Callable[[float], None],
    ) -> None:
        """Describe the sampler; `start` begins.

        Args:
            on_loop_lag: takes the loop's lag in seconds; called on the loop.
            on_gil_lag: takes the thread's lag in seconds; called in the thread.
        """
        self._loop_of = loop_of
        self._on_loop_lag = on_loop_lag
        self._on_gil_lag = on_gil_lag
        self._ended = threading.Event()
        self._asked_s: float | None = None  # when the pending callback was scheduled
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def blocked_s(self) -> float:
        """How long the pending callback of the loop has waited; 0: none is pending.

        Thread safety: from any thread.
        """
        asked_s = self._asked_s
        return 0.0 if asked_s is None or not self._loop_of() else _now_s() - asked_s

    def start(self) -> None:
        """Begin to take samples."""
        self._thread.start()

    def end(self) -> None:
        """Take no more samples; the thread ends at once, and is not waited for."""
        self._ended.set()

    def _run(self) -> None:
        while True:
            due_s = _now_s() + INTERVAL_S
            if self._ended.wait(INTERVAL_S):
                return
            self._on_gil_lag(max(_now_s() - due_s, 0.0))
            self._ask_loop()

    def _ask_loop(self) -> None:
        loop = self._loop_of()
        if loop is None or self._asked_s is not None:
            return
        asked_s = self._asked_s = _now_s()
        try:
            loop.call_soon_threadsafe(self._on_loop, asked_s)
        except RuntimeError:  # the loop has just been closed
            self._asked_s = None

    def _on_loop(self, asked_s: float) -> None:
        self._asked_s = None
        self._on_loop_lag(_now_s() - asked_s)
