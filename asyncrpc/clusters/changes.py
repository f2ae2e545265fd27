"""The changes of a cluster, for its program."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final
from weakref import WeakSet

from asyncrpc.core.loop.loops import check_loop

# Changes that a program has not taken; beyond this the oldest are dropped.
CHANGES_MAX: Final = 1024


@dataclass(frozen=True, slots=True)
class ClusterChange:
    """A change of a worker of a cluster.

    Attributes:
        kind: `"ready"`: it can be called; `"lost"`: it has ended, and starts again
            after the backoff; `"failed"`: it has ended or did not start, and stays
            away; `"stopped"`: as the program asked.
        worker: its name.
        life: how often it has been started, this time included.
        why: what happened, as text; empty for `"ready"` and `"stopped"`.
    """

    kind: str
    worker: str
    life: int
    why: str = ""


class ClusterChanges(AsyncIterator[ClusterChange]):
    """The changes from now on, one after the other; from `Cluster.changes`.

    The iteration ends with the cluster.  At most 1024 untaken changes are kept; beyond
    this the oldest are dropped.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[ClusterChange] = deque(maxlen=CHANGES_MAX)
        self._news = asyncio.Event()
        self._is_over = False

    def __aiter__(self) -> ClusterChanges:
        return self

    async def __anext__(self) -> ClusterChange:
        """Wait for the next change; a cancelled wait has taken none.

        Raises:
            UsageError: this is not the cluster's event loop.
        """
        check_loop("ClusterChanges", self._loop, "the cluster")
        while not self._waiting:
            if self._is_over:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()  # the end of the cluster sets it
        return self._waiting.popleft()

    def put(self, change: ClusterChange) -> None:
        """Internal: add a change."""
        self._waiting.append(change)
        self._news.set()

    def end(self) -> None:
        """Internal: let the iteration end, after the changes that are kept."""
        self._is_over = True
        self._news.set()


class Broadcast:
    """Passes changes to all iterators that the program still holds."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._iterators: WeakSet[ClusterChanges] = WeakSet()

    def changes(self) -> ClusterChanges:
        """Return an iterator from now on."""
        iterator = ClusterChanges(self._loop)
        self._iterators.add(iterator)
        return iterator

    def tell(self, change: ClusterChange) -> None:
        """Pass a change to all iterators."""
        for iterator in self._iterators:
            iterator.put(change)

    def end(self) -> None:
        """End all iterators."""
        for iterator in self._iterators:
            iterator.end()
