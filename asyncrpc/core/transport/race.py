"""A race: one connection, tried in several ways, of which the first to come up wins.

A later way is tried when one before it has failed, or when none has come up within the
stagger.  A dead way therefore costs a quarter of a second, and not the two minutes of a
TCP timeout.

Source: RFC 8305 (Happy Eyeballs), section 5; the order of the ways is the caller's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Final, Generic, TypeVar

WayT = TypeVar("WayT", bound=Hashable)
ConnectionT = TypeVar("ConnectionT")

STAGGER_S: Final = 0.25  # RFC 8305, section 8: "Connection Attempt Delay"


class Race(Generic[WayT, ConnectionT]):
    """The attempts to connect in several ways.

    Attributes:
        errors: why it failed, for each way that has.
    """

    def __init__(
        self,
        connect: Callable[[WayT], Awaitable[ConnectionT]],
        discard: Callable[[ConnectionT], None],
    ) -> None:
        """Prepare; nothing is tried yet.

        Args:
            connect: connects in one way; it may raise OSError.
        """
        self.errors: dict[WayT, OSError] = {}
        self._connect = connect
        self._discard = discard
        self._winner: ConnectionT | None = None
        self._attempts: list[asyncio.Task[None]] = []

    async def run(
        self, ways: Sequence[WayT], *, limit_s: float | None = None
    ) -> ConnectionT | None:
        """Return the connection that comes up first; None if none does.

        Args:
            limit_s: seconds for all of them; None: no limit but those of `connect`.
        """
        try:
            with contextlib.suppress(TimeoutError):  # then some have not answered
                async with asyncio.timeout(limit_s), asyncio.TaskGroup() as tasks:
                    await self._try(ways, tasks)
        except BaseException as error:
            if self._winner is not None:
                self._discard(self._winner)
            if isinstance(
                error, BaseExceptionGroup
            ):  # a bug: show it, not its wrapping
                raise error.exceptions[0] from error
            raise
        return self._winner

    async def _try(self, ways: Sequence[WayT], tasks: asyncio.TaskGroup) -> None:
        for way in ways:
            attempt = self._attempt(way)
            task = tasks.create_task(attempt, name=f"asyncrpc-dial-{way}")
            self._attempts.append(task)
            await self._one_ends(STAGGER_S)
            if self._winner is not None:
                break
        while self._winner is None and not all(task.done() for task in self._attempts):
            await self._one_ends(None)
        for task in self._attempts:
            task.cancel()

    async def _one_ends(self, timeout_s: float | None) -> None:
        under_way = [task for task in self._attempts if not task.done()]
        first = asyncio.FIRST_COMPLETED
        await asyncio.wait(under_way, timeout=timeout_s, return_when=first)

    async def _attempt(self, way: WayT) -> None:
        try:
            connection = await self._connect(way)
        except OSError as error:
            self.errors[way] = error
            return
        if self._winner is None:
            self._winner = connection
        else:  # both came up in one turn of the loop
            self._discard(connection)
