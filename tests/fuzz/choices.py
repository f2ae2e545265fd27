"""Bytes as choices: how a fuzzer that changes bytes steers a test with structure."""

from __future__ import annotations

from typing import Any, Final

import msgpack

# Where decoders go wrong, if they do: around powers of two, and below zero.
EDGES: Final = (
    *(0, 1, 2, 3, 7, 8, 16, 63, 64, 65, 127, 128, 255, 256, 4095, 4096),
    *((1 << 16) - 1, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32),
    *((1 << 56) - 1, 1 << 56, (1 << 62), (1 << 63) - 1, 1 << 63, (1 << 64) - 1),
)
_DEPTH_MAX: Final = 4


class Choices:
    """Reads choices off some bytes; once they are used up, each choice is the first."""

    def __init__(self, data: bytes) -> None:
        self.left = memoryview(data)  # bytes that have not been used

    def __bool__(self) -> bool:
        return bool(self.left)

    def below(self, stop: int) -> int:
        """Choose a number from 0, below `stop`, which is at most 256."""
        if not self.left:
            return 0
        chosen, self.left = self.left[0] % stop, self.left[1:]
        return chosen

    def take(self, nbytes: int) -> bytes:
        """Use up to so many bytes as they are."""
        taken, self.left = bytes(self.left[:nbytes]), self.left[nbytes:]
        return taken

    def number(self) -> int:
        """Choose a number that fits 64 bits without a sign: mostly small or an edge."""
        how = self.below(4)
        if how == 0:
            return self.below(32)
        if how == 1:
            return EDGES[self.below(len(EDGES))]
        return int.from_bytes(self.take(2 if how == 2 else 8), "little")

    def signed(self) -> int:
        """Choose a number that fits 64 bits with a sign."""
        number = self.number() & ((1 << 63) - 1)
        return -number if self.below(4) == 0 else number

    def tree(self, texts: tuple[str, ...], depth: int = 0) -> Any:
        """Choose something that msgpack can write; leaves may be one of `texts`."""
        how = self.below(12 if depth < _DEPTH_MAX else 8)
        return self._leaf(how, texts) if how < 8 else self._branch(how, texts, depth)

    def _leaf(self, how: int, texts: tuple[str, ...]) -> Any:
        if how < 3:
            return (None, True, False)[how]
        if how == 3:
            return self.signed()
        if how == 4:
            return (0.5, float("nan"), float("inf"), -0.0)[self.below(4)]
        if how == 5:
            return texts[self.below(len(texts))]
        if how == 6:
            return self.take(self.below(24))
        return msgpack.ExtType(0, self.below(8).to_bytes(4, "little"))

    def _branch(self, how: int, texts: tuple[str, ...], depth: int) -> Any:
        if how == 8:
            count = self.below(5)
            return {
                texts[self.below(len(texts))]: self.tree(texts, depth + 1)
                for _ in range(count)
            }
        if how == 9:
            inner = msgpack.packb(self.tree(texts, depth + 1))
            return msgpack.ExtType(self.below(24), inner)
        return [self.tree(texts, depth + 1) for _ in range(self.below(6))]
