"""Turns of the calls of one worker for one series: one call at a time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from asyncrpc.errors import UsageError

CALLS_MAX: Final = 256  # that wait for their turn


@dataclass(slots=True)
class Waiting:
    """A call that waits for its turn.

    Attributes:
        ready: done when the turn has come.
        problem: why the call stopped waiting; empty while it waits.
    """

    ready: asyncio.Future[None]
    problem: str = ""


class CallTurns:
    """The turns of the calls for one series.

    Attributes:
        is_taken: whether a call has the turn.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, skip: Callable[[str], None]
    ) -> None:
        """Begin with no call.

        Args:
            loop: the event loop of the worker.
            skip: called with the reason for each call that gives up before its turn.
        """
        self.is_taken = False
        self._loop = loop
        self._skip = skip
        self._calls: deque[Waiting] = deque()

    async def take(self, what: str) -> None:
        """Wait for the turn.

        Args:
            what: the name of the round, for errors.

        Raises:
            UsageError: `CALLS_MAX` calls wait already.
        """
        if not self.is_taken:
            self.is_taken = True
            return
        if len(self._calls) >= CALLS_MAX:
            raise UsageError(
                f"{CALLS_MAX} calls of this worker wait for {what} already; await them "
                "first"
            )
        call = Waiting(self._loop.create_future())
        self._calls.append(call)
        try:
            await call.ready  # the call before it ends, at the latest with its worker
        except BaseException:
            call.problem = "stopped waiting before its turn came"
            if call.ready.done() and not call.ready.cancelled():  # it has just come
                self._skip(call.problem)
                self.pass_on()
            raise

    def pass_on(self) -> None:
        """Give the turn to the next call."""
        while self._calls:
            call = self._calls.popleft()
            if not call.problem:
                call.ready.set_result(None)
                return
            self._skip(call.problem)
        self.is_taken = False
