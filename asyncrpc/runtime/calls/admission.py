"""The limit of calls that a worker serves at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from asyncrpc.errors import Outcome, OverloadedError, RejectedError
from asyncrpc.runtime.calls.machine.served_rate import ServedRate
from asyncrpc.runtime.lifecycle import Lifecycle


class CallAdmission:
    """The calls that one worker serves, counted.

    Attributes:
        active: how many there are now.
        refused: how many were refused, ever.
        ended: how many have ended, ever; also refused ones, which are answered.
    """

    def __init__(
        self, lifecycle: Lifecycle, calls_max: int, now_s: Callable[[], float]
    ) -> None:
        """Admit calls up to a limit, until the worker shuts down.

        Args:
            lifecycle: of the worker.
            calls_max: how many calls may be served at the same time.
            now_s: reads the clock; called when a call is refused.
        """
        self.active = self.refused = self.ended = 0
        self._rate = ServedRate()
        self._now_s = now_s
        self._lifecycle = lifecycle
        self._calls_max = calls_max
        self._idle = asyncio.Event()
        self._few = 0  # `wait_idle` is woken at so many calls, or fewer

    def admit(self) -> None:
        """Accept a call, or refuse it.

        Raises:
            OverloadedError: too many calls.
            RejectedError: the worker is shutting down.
        """
        if self._lifecycle.is_draining:
            self.refused += 1
            raise RejectedError(
                "the worker is shutting down", outcome=Outcome.NOT_EXECUTED
            )
        if self.active >= self._calls_max:
            served = self.ended - self.refused
            self.refused += 1
            after_s = self._rate.retry_after_s(served, self.active, self._now_s())
            raise OverloadedError(
                f"the worker is serving {self.active} calls, its limit "
                f"(LimitOptions.inbound_calls_max); try again in {after_s:.3g} s",
                retry_after_s=after_s,
            )

    def on_served(self) -> None:
        """Count a call as ended: it has been answered, or its caller has gone."""
        self.active -= 1
        self.ended += 1
        if self.active <= self._few:
            self._idle.set()

    async def wait_idle(self, *, but: int = 0) -> None:
        """Wait until no call is served.

        Args:
            but: how many calls may still be served: those that wait here themselves.

        Cancellation:
            Nothing has changed.
        """
        self._few = max(self._few, but)
        while self.active > but:
            self._idle.clear()
            await self._idle.wait()  # shutdown and drain have a limit
