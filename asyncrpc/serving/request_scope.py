"""What cancels a handler: the deadline of its request, and its client's leaving.

`asyncrpc.deadline` cancels its block.  A stream must first tell its client that its
time is over: it postpones the cancellation by `ENDING_S`, and ends by itself.

The deadline is that of the response.  It is lifted once the response is complete, or
the handler has ended: neither background tasks of a framework, nor tasks that the
handler has started and left, which have copies of its context, are limited by it then.

Invariant: a block that is cancelled because its client left ends as if it had returned;
any other cancellation passes through.
"""

from __future__ import annotations

import asyncio
from asyncio import CancelledError
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Final, Self

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


class ClientLeftError(ConnectionResetError):
    """The client has closed its connection, so no answer can be sent."""


class ClientScope:
    """A block that is cancelled when its client leaves.

    Attributes:
        has_left: whether the client has left while the block ran.
    """

    def __init__(self) -> None:
        self.has_left = False
        self._task: asyncio.Task[Any] | None = None
        self._cancelling = 0

    async def __aenter__(self) -> Self:
        """Begin the block."""
        self._task = asyncio.current_task()
        assert self._task is not None  # a coroutine runs in a task
        self._cancelling = self._task.cancelling()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        """End the block; it has not failed if `leave` has cancelled it."""
        task, self._task = self._task, None
        assert task is not None
        if not self.has_left:
            return False
        # Like `asyncio.timeout`, which takes one more loop iteration to cancel.
        is_alone = task.uncancel() <= self._cancelling
        return is_alone and kind is not None and issubclass(kind, CancelledError)

    def leave(self) -> None:
        """Cancel the block: the client has left.  Idempotent; not from the block."""
        if self._task is not None and not self.has_left:
            self.has_left = True
            self._task.cancel()


@asynccontextmanager
async def beside(coroutine: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run a coroutine for the duration of a block; ignore its error."""
    task = asyncio.get_running_loop().create_task(coroutine)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # so that asyncio does not log it
