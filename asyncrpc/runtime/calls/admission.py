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
        if not self.active:
            self._idle.set()

    async def wait_idle(self) -> None:
        """Wait until no call is served.

        Cancellation:
            Nothing has changed.
        """
        self._idle.clear()
        if self.active:
            await self._idle.wait()  # who shuts down has a limit
