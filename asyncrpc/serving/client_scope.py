"""Watches the client of a handler, and cancels the handler when the client leaves.

Invariant: a block that is cancelled because its client left ends as if it had returned;
any other cancellation passes through.
"""

from __future__ import annotations

import asyncio
from asyncio import CancelledError
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self


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
