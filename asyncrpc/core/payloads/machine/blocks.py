"""Decides which memory of received payloads is kept for later ones, and for how long.

The first write to a fresh page costs about ten times the write itself, because the
kernel must find the page and clear it.  So the memory of a large payload is kept for a
while after its tensor has died.  Blocks have eight sizes per power of two, and a
payload takes a block that is up to a quarter longer than needed: so tensors of similar
sizes use the same blocks.

Sans-IO: time is a number; `B` is the service's block, opaque here.
"""

from __future__ import annotations

from collections import deque
from typing import Final, Generic, TypeVar

B = TypeVar("B")

WASTE: Final = 4  # a block may be longer than its payload by at most a fourth of it


def size_class(nbytes: int) -> int:
    """Return the length of the block to make for so many bytes, at least 8.

    It is at most an eighth longer than needed.
    """
    step = 1 << (max(nbytes.bit_length(), 4) - 4)
    return -(-nbytes // step) * step


class IdleBlocks(Generic[B]):
    """Idle blocks: the newest is used first, the oldest is dropped first.

    Attributes:
        limit_bytes: the limit of kept bytes.
        idle_bytes: the number of kept bytes.
    """

    __slots__ = ("_by_size", "idle_bytes", "limit_bytes")

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.idle_bytes = 0
        # By size, oldest first; no size without blocks.
        self._by_size: dict[int, deque[tuple[float, B]]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_size)

    def take(self, nbytes: int) -> B | None:
        """Return a kept block for so many bytes, or None if a fresh one must be made.

        In that case other blocks are dropped, so that with the fresh one the limit is
        not exceeded, unless the fresh block alone exceeds it.
        """
        size = size_class(nbytes)
        most = nbytes + nbytes // WASTE
        fits = [
            block_size for block_size in self._by_size if size <= block_size <= most
        ]
        if fits:
            return self._pop(min(fits), newest=True)
        self._shrink_to(self.limit_bytes - size)
        return None

    def give_back(self, block: B, size: int, now_s: float) -> bool:
        """Keep a block of `size` bytes; False if it is longer than the limit."""
        if size > self.limit_bytes:
            return False
        self._shrink_to(self.limit_bytes - size)
        self._by_size.setdefault(size, deque()).append((now_s, block))
        self.idle_bytes += size
        return True

    def limit_to(self, nbytes: int) -> None:
        """Keep at most so much from now on."""
        self.limit_bytes = nbytes
        self._shrink_to(nbytes)

    def drop_older(self, than_s: float) -> None:
        """Drop the blocks given back at `than_s` or before."""
        while self._by_size and self.oldest_s <= than_s:
            self._pop(self._oldest())

    def clear(self) -> None:
        """Drop them all."""
        self._by_size.clear()
        self.idle_bytes = 0

    @property
    def oldest_s(self) -> float:
        """When the oldest block was given back; must not be read without blocks."""
        return self._by_size[self._oldest()][0][0]

    def _oldest(self) -> int:
        """Return the size of the oldest block."""
        return min(self._by_size, key=lambda size: self._by_size[size][0][0])

    def _shrink_to(self, nbytes: int) -> None:
        while self._by_size and self.idle_bytes > nbytes:
            self._pop(self._oldest())

    def _pop(self, size: int, *, newest: bool = False) -> B:
        blocks = self._by_size[size]
        _, block = blocks.pop() if newest else blocks.popleft()
        if not blocks:
            del self._by_size[size]
        self.idle_bytes -= size
        return block
