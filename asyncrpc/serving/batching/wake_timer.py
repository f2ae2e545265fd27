"""One timer, which is set again whenever the next due time changes."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable


class WakeTimer:
    """Calls a function at the time for which it was last set."""

    def __init__(self, wake: Callable[[float], None]) -> None:
        self._wake = wake
        self._timer: asyncio.Handle | None = None
        self._at_s = 0.0  # kept here: a fired handle of uvloop does not know its time

    def set(self, at_s: float | None, context: contextvars.Context) -> None:
        """Wake at a time of the running loop; this replaces the time set before.

        Args:
            at_s: when; None: never.
        """
        if self._timer is not None:
            if self._at_s == at_s:
                return
            self._timer.cancel()
            self._timer = None
        if at_s is not None:
            loop = asyncio.get_running_loop()
            self._at_s = at_s
            self._timer = loop.call_at(at_s, self._on_time, at_s, context=context)

    def _on_time(self, at_s: float) -> None:
        self._timer = None
        self._wake(at_s)
