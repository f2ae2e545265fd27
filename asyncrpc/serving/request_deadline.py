"""The deadline of a request: it cancels the handler, and a stream a moment later.

`asyncrpc.deadline` cancels its block.  A stream must first tell its client that its
time is over: it postpones the cancellation by `ENDING_S`, and ends by itself.

The deadline is that of the response.  It is lifted once the response is complete, or
the handler has ended: neither background tasks of a framework, nor tasks that the
handler has started and left, which have copies of its context, are limited by it then.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from typing import Final

from asyncrpc.core.calls.context import current_deadline, deadline_var, earlier
from asyncrpc.extend import Deadline

# Calls watch the deadline themselves, and their error says more.  The same time as in
# `asyncrpc.deadline`.
_GRACE_S: Final = 0.005
# uvloop's timers are early, by 1 ms at most.
_EARLY_S: Final = 0.002
ENDING_S: Final = 5.0  # for the last bytes to a client that reads

_current: Final[ContextVar[RequestDeadline | None]] = ContextVar(
    "asyncrpc_request_deadline", default=None
)


class _ResponseLimit(Deadline):
    """A deadline that ends with the response that it limits."""

    __slots__ = ("is_lifted",)

    is_lifted: bool  # type: ignore[misc]  # a slot, over the class's constant

    def __init__(self, limit: Deadline) -> None:
        super().__init__(limit.at_s, limit.allowed_s)
        object.__setattr__(self, "is_lifted", False)

    def lift(self) -> None:
        object.__setattr__(self, "is_lifted", True)  # the rest of it stays frozen


class RequestDeadline:
    """The time at which a handler is cancelled."""

    def __init__(self, limit: Deadline) -> None:
        self.limit = _ResponseLimit(limit)
        self._loop = asyncio.get_running_loop()
        self._scope = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def cutting_off(self) -> AsyncIterator[None]:
        """Cancel a block at the deadline."""
        try:
            async with self._scope:
                self.put_off(0.0)
                yield
        finally:
            self.lift()

    def lift(self) -> None:
        """Limit nothing any more: the response is complete, or will not be."""
        self.limit.lift()
        if self._timer is not None:
            self._timer.cancel()
        with suppress(RuntimeError):  # its time is over already
            self._scope.reschedule(None)

    def put_off(self, by_s: float) -> None:
        """Cancel `by_s` seconds after the deadline instead."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(self.limit.at_s + by_s, self._cut_off)

    def _cut_off(self) -> None:
        # Counted from now, as the loop may have been late.
        self._scope.reschedule(self._loop.time() + _GRACE_S)


@asynccontextmanager
async def request_deadline(
    timeout_s: float | None,
) -> AsyncIterator[RequestDeadline | None]:
    """Limit what a handler awaits, and every call that it makes, on all workers.

    Args:
        timeout_s: seconds from now; None adds no limit.
    """
    if timeout_s is None:
        yield None
        return
    limit = Deadline.after(timeout_s, asyncio.get_running_loop().time())
    deadline = RequestDeadline(earlier(limit, current_deadline()))
    token, current = deadline_var.set(deadline.limit), _current.set(deadline)
    try:
        async with deadline.cutting_off():
            yield deadline
    finally:
        _current.reset(current)
        deadline_var.reset(token)


@asynccontextmanager
async def until_deadline() -> AsyncIterator[None]:
    """End a stream at the current deadline by `TimeoutError`, not by a cancellation."""
    limit = current_deadline()
    if limit is None:
        yield
        return
    request = _current.get()
    if request is not None:
        request.put_off(ENDING_S)
    async with asyncio.timeout_at(limit.at_s + _EARLY_S):
        yield


def is_over() -> bool:
    """Return whether the current deadline has passed."""
    limit = current_deadline()
    return limit is not None and limit.at_s <= asyncio.get_running_loop().time()
