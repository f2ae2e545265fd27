"""Copies of large payloads into slabs, in pieces, between which the loop runs."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

COPY_PIECE_BYTES: Final = 512 << 10

Copy: TypeAlias = tuple[memoryview, memoryview]  # to, from


class Copying:
    """The copies for one message."""

    __slots__ = ("_copies", "_done", "on_whole")

    def __init__(self, copies: Sequence[Copy], on_whole: Callable[[], None]) -> None:
        """Prepare to copy.

        Args:
            copies: sources and targets.
            on_whole: called by a queue once all have been made.
        """
        self.on_whole = on_whole
        self._copies = deque(copies)
        self._done = 0  # bytes of the first copy

    def step(self) -> bool:
        """Copy one piece; return whether that was the last."""
        left = COPY_PIECE_BYTES
        while left and self._copies:
            target, source = self._copies[0]
            start = self._done
            stop = min(start + left, source.nbytes)
            # Holds the GIL, for 0.1 ms at most.  A copy that releases the GIL would
            # wait for it after each piece, 5 ms if a thread is busy.
            target[start:stop] = source[start:stop]
            left -= stop - start
            self._done = stop
            if stop == source.nbytes:
                self._copies.popleft()
                self._done = 0
        return not self._copies


class CopyQueue:
    """The copies of one worker: one piece per turn of the loop, round robin."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[Copying] = deque()

    def add(self, copying: Copying) -> None:
        """Begin to copy in pieces; an idle queue copies the first piece now."""
        self._waiting.append(copying)
        if len(self._waiting) == 1:
            self._copy_piece()

    def remove(self, copying: Copying) -> None:
        """Stop copying."""
        self._waiting.remove(copying)

    def _copy_piece(self) -> None:
        if not self._waiting:
            return
        copying = self._waiting.popleft()
        if copying.step():
            copying.on_whole()
        else:
            self._waiting.append(copying)
        if self._waiting:
            self._loop.call_soon(self._copy_piece)
