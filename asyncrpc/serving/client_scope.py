"""What happens beside a handler: its client is watched, and may leave.

Invariant: a block that a client's leaving has cut off ends as if it had returned; any
other cancellation passes through.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self


class ClientLeftError(ConnectionResetError):
    """The client has closed its connection: there is nobody to answer."""


class ClientScope:
    """A block that is cancelled when its client leaves.

    Attributes:
        has_left: whether the client has left while the block ran.
    """

    def __init__(self) -> None:
        """Begin with a client that is there."""
        self.has_left = False
        self._is_open = False
        self._scope = asyncio.timeout(None)

    async def __aenter__(self) -> Self:
        """Begin the block.

        Raises:
            RuntimeError: this is no task.
        """
        await self._scope.__aenter__()
        self._is_open = True
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        """End the block; it has not failed if `leave` has cut it off."""
        self._is_open = False
        try:
            await self._scope.__aexit__(kind, error, traceback)
        except TimeoutError:  # that the scope makes of its own cancellation alone
            return True
        return False

    def leave(self) -> None:
        """Cancel the block: the client has left.  Idempotent."""
        if self._is_open and not self.has_left:
            self.has_left = True
            self._scope.reschedule(asyncio.get_running_loop().time())


@asynccontextmanager
async def beside(coroutine: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run a coroutine as long as a block; an error of it is left unsaid.

    Cancellation:
        The coroutine has been cancelled, and is not waited for.
    """
    task = asyncio.get_running_loop().create_task(coroutine)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # so that asyncio does not tell of it
