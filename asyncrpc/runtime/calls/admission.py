"""The limit of calls that a worker serves at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sized
from typing import Final, NoReturn

from asyncrpc.errors import Outcome, OverloadedError, RejectedError
from asyncrpc.runtime.calls.machine.served_rate import ServedRate
from asyncrpc.runtime.lifecycle import Lifecycle

# Of a limit of so many calls or more, one peer has a part: a call takes 3 KB at least.
SHARED_MIN: Final = 1000
PEER_PART: Final = 2
# Messages to services that one peer waits for; many wait for values, or for others.
PEER_MESSAGES_MAX: Final = 50_000


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
        # Of a limit that is not small, one peer must not take all.
        self._peer_calls_max = (
            calls_max if calls_max < SHARED_MIN else calls_max // PEER_PART
        )
        self._idle = asyncio.Event()
        self._few = 0  # `wait_idle` is woken at so many calls, or fewer

    def admit(self, of_peer: Sized) -> None:
        """Accept a call, or refuse it.

        Args:
            of_peer: the calls of its peer that are served.

        Raises:
            OverloadedError: too many calls.
            RejectedError: the worker is shutting down.
        """
        if self._lifecycle.is_draining:
            self.refused += 1
            raise RejectedError(
                "the worker is shutting down", outcome=Outcome.NOT_EXECUTED
            )
        if self.active >= self._peer_calls_max:
            if self.active >= self._calls_max:
                limit = "its limit (LimitOptions.inbound_calls_max)"
                self._refuse(f"{self.active} calls, {limit}")
            if len(of_peer) >= self._peer_calls_max:
                share = "one peer's share of LimitOptions.inbound_calls_max"
                self._refuse(f"{len(of_peer)} calls of this peer, {share}")

    def admit_message(self, of_peer: Sized) -> None:
        """Accept a message to a service that is to be answered, or refuse it.

        Args:
            of_peer: what its peer waits for.

        Raises:
            OverloadedError: too many of this peer have not been answered.
        """
        if len(of_peer) >= PEER_MESSAGES_MAX:
            self._refuse(f"{len(of_peer)} messages of this peer, the limit of one")

    def _refuse(self, what: str) -> NoReturn:
        served = self.ended - self.refused
        self.refused += 1
        after_s = self._rate.retry_after_s(served, self.active, self._now_s())
        raise OverloadedError(
            f"the worker is serving {what}; try again in {after_s:.3g} s",
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
