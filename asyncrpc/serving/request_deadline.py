"""The deadline of a request: it cuts the handler off, and a stream a moment later.

`asyncrpc.deadline` cancels its block.  A stream to a client must rather say that its
time is over, and for that it needs a moment: it puts the cutting off by `ENDING_S`,
and ends by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Final

from asyncrpc.clock import Deadline
from asyncrpc.runtime.calls.context import deadline_var

# Calls watch the deadline themselves and say more of it.  As of `asyncrpc.deadline`.
_GRACE_S: Final = 0.005
# uvloop's timers are early, by 1 ms at most.
_EARLY_S: Final = 0.002
ENDING_S: Final = 5.0  # for the last bytes to a client that reads

_current: Final[ContextVar[RequestDeadline | None]] = ContextVar(
    "asyncrpc_request_deadline", default=None
)


class RequestDeadline:
    """The time at which a handler is cut off.

    Attributes:
        limit: the deadline.
    """

    def __init__(self, limit: Deadline) -> None:
        """Cut nothing off yet.

        Args:
            limit: by the clock of the running loop.
        """
        self.limit = limit
        self._loop = asyncio.get_running_loop()
        self._scope = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def cutting_off(self) -> AsyncIterator[None]:
        """Cancel a block at the deadline.

        Raises:
            TimeoutError: it passed.

        Cancellation:
            Passes through.
        """
        try:
            async with self._scope:
                self.put_off(0.0)
                yield
        finally:
            if self._timer is not None:
                self._timer.cancel()

    def put_off(self, by_s: float) -> None:
        """Cut off so many seconds later than the deadline."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(self.limit.at_s + by_s, self._cut_off)

    def _cut_off(self) -> None:
        # Counted from when the loop came to it, which may be late.
        self._scope.reschedule(self._loop.time() + _GRACE_S)


@asynccontextmanager
async def request_deadline(timeout_s: float | None) -> AsyncIterator[None]:
    """Limit what a handler awaits, and every call that it makes, on all workers.

    Args:
        timeout_s: seconds from now; None adds no limit.

    Raises:
        TimeoutError: it passed.

    Cancellation:
        Passes through.
    """
    if timeout_s is None:
        yield
        return
    limit = Deadline.after(timeout_s, asyncio.get_running_loop().time())
    outer = deadline_var.get()
    made = RequestDeadline(limit if outer is None else min(limit, outer))
    token, current = deadline_var.set(made.limit), _current.set(made)
    try:
        async with made.cutting_off():
            yield
    finally:
        _current.reset(current)
        deadline_var.reset(token)


@asynccontextmanager
async def until_deadline() -> AsyncIterator[None]:
    """Let `TimeoutError` end a stream at the current deadline, and not a cancellation.

    Raises:
        TimeoutError: it passed.

    Cancellation:
        Passes through.
    """
    limit = deadline_var.get()
    if limit is None:
        yield
        return
    request = _current.get()
    if request is not None:
        request.put_off(ENDING_S)
    async with asyncio.timeout_at(limit.at_s + _EARLY_S):
        yield


def is_over() -> bool:
    """Return whether the deadline of what runs here has passed."""
    limit = deadline_var.get()
    return limit is not None and limit.at_s <= asyncio.get_running_loop().time()
