"""The changes of a gang, for its program."""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final
from weakref import WeakSet

from asyncrpc.core.loop.loops import check_loop, loop_for

# Changes that a program has not taken; beyond this the oldest are dropped.  Each change
# names its generation, so a later one makes up for a dropped one.
CHANGES_MAX: Final = 256


class GangChangeKind(enum.StrEnum):
    """What has happened to a gang."""

    LOST = "lost"  # workers are gone; a restart follows
    RUNNING = "running"  # a generation runs
    FAILED = "failed"  # no restart follows


@dataclass(frozen=True, slots=True)
class GangChange:
    """A change of a gang.

    Attributes:
        kind: `"lost"`: workers are gone, and new ones start after the backoff;
            `"running"`: all workers of a generation can be called; `"failed"`: no
            restart follows.
        generation: which generation lost workers, runs or failed.
        ranks: of the workers that were lost, or that are new.
        why: what happened, as text; empty for `"running"`.
    """

    kind: GangChangeKind
    generation: int
    ranks: tuple[int, ...]
    why: str = ""


class GangChanges(AsyncIterator[GangChange]):
    """The changes from now on, one after the other; from `Gang.changes`.

    The iteration ends with the gang, after the change `"failed"` if there is one.  At
    most 256 untaken changes are kept; beyond this the oldest are dropped.
    """

    def __init__(self, announcer: Announcer) -> None:
        self._announcer = announcer
        self._waiting: deque[GangChange] = deque(maxlen=CHANGES_MAX)
        self._news = asyncio.Event()
        self._is_over = False

    def __aiter__(self) -> GangChanges:
        return self

    async def __anext__(self) -> GangChange:
        """Wait for the next change; a cancelled wait has taken none.

        Raises:
            UsageError: this is not the gang's event loop.
        """
        self._announcer.check_loop("GangChanges")
        while not self._waiting:
            if self._is_over:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()  # the end of the gang sets it
        return self._waiting.popleft()

    def put(self, change: GangChange) -> None:
        """Internal: add a change."""
        self._waiting.append(change)
        self._news.set()

    def end(self) -> None:
        """Internal: let the iteration end, after the changes that are kept."""
        self._is_over = True
        self._news.set()


class Announcer:
    """Passes changes to all iterators, and keeps the last state.

    Attributes:
        running: the last generation that ran; 0 before the first.
        failure: the change with which the gang failed; None if it has not.
    """

    def __init__(self) -> None:
        self.running = 0
        self.failure: GangChange | None = None
        self.is_over = False
        self._loop: asyncio.AbstractEventLoop | None = None
        # Iterators that the program no longer holds get no more changes.
        self._iterators: WeakSet[GangChanges] = WeakSet()

    def bind(self) -> None:
        """Bind to the running event loop, as the gang is entered."""
        self._loop = loop_for("Gang")

    def check_loop(self, used: str) -> None:
        """Raise UsageError unless the gang's event loop runs in this thread."""
        if self._loop is not None:
            check_loop(used, self._loop, "the gang")

    def changes(self) -> GangChanges:
        """Return an iterator from now on."""
        iterator = GangChanges(self)
        if self.is_over:
            iterator.end()
        else:
            self._iterators.add(iterator)
        return iterator

    def tell(self, change: GangChange) -> None:
        """Pass a change to all iterators."""
        if change.kind is GangChangeKind.RUNNING:
            self.running = change.generation
        elif change.kind is GangChangeKind.FAILED:
            self.failure = change
        for iterator in self._iterators:
            iterator.put(change)
        if self.failure is not None:
            self.end()

    def end(self) -> None:
        """End all iterators."""
        self.is_over = True
        for iterator in self._iterators:
            iterator.end()
        self._iterators.clear()
