"""One timer, set again whenever what it waits for changes."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable


class WakeTimer:
    """Calls a function at the time that it was set for last."""

    def __init__(self, wake: Callable[[float], None]) -> None:
        """Describe it.

        Args:
            wake: called with that time: a loop's own clock may show a little less, as
                uvloop rounds to milliseconds.
        """
        self._wake = wake
        self._timer: asyncio.Handle | None = None
        self._at_s = 0.0  # uvloop's handle of a time that has come does not know it

    def set(self, at_s: float | None, context: contextvars.Context) -> None:
        """Wake at a time of the loop that runs here, and not at an earlier set one.

        Args:
            at_s: when; None: never.
            context: to call the function in.
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
