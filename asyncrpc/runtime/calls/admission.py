"""The limit of calls that a worker serves at the same time."""

from __future__ import annotations

import asyncio

from asyncrpc.errors import Outcome, RejectedError
from asyncrpc.runtime.lifecycle import Lifecycle


class CallAdmission:
    """The calls that one worker serves, counted.

    Attributes:
        active: how many there are now.
        refused: how many were refused, ever.
    """

    def __init__(self, lifecycle: Lifecycle, calls_max: int) -> None:
        """Admit so many at the same time, until the worker shuts down."""
        self.active = self.refused = 0
        self._lifecycle = lifecycle
        self._calls_max = calls_max
        self._idle = asyncio.Event()
        self._few = 0  # for somebody who waits, so many are as good as none

    def admit(self) -> None:
        """Accept a call, or refuse it.

        Raises:
            RejectedError: too many calls, or the worker is shutting down.
        """
        if self._lifecycle.is_draining:
            self.refused += 1
            raise RejectedError(
                "the worker is shutting down", outcome=Outcome.NOT_EXECUTED
            )
        if self.active >= self._calls_max:
            self.refused += 1
            raise RejectedError(
                f"the worker is serving {self.active} calls, its limit "
                "(LimitOptions.inbound_calls_max); try again later",
                outcome=Outcome.NOT_EXECUTED,
            )

    def on_served(self) -> None:
        """Count a call as ended: it has been answered, or its caller has gone."""
        self.active -= 1
        if self.active <= self._few:
            self._idle.set()

    async def wait_idle(self, *, but: int = 0) -> None:
        """Wait until no call is served.

        Args:
            but: so many may still be: the calls that wait here themselves.

        Cancellation:
            Nothing has changed.
        """
        self._few = max(self._few, but)
        while self.active > but:
            self._idle.clear()
            await self._idle.wait()  # who shuts down, or drains, has a limit
