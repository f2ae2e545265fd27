"""Output of several processes on one terminal: whole lines, each with its rank."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import BinaryIO, Final

# A process that never ends its line must not fill our memory.
_LINE_BYTES_MAX: Final = 1 << 16
_COLOURS: Final = (36, 33, 32, 35, 34, 31)  # ANSI: cyan, yellow, green, ...


def rank_prefix(rank: int, *, is_coloured: bool) -> bytes:
    """Return the prefix of each line of `rank`."""
    if not is_coloured:
        return b"[%d] " % rank
    return b"\x1b[%dm[%d]\x1b[0m " % (_COLOURS[rank % len(_COLOURS)], rank)


class LinePrefixer:
    """Puts a prefix before each line of a byte stream that arrives in any pieces."""

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._partial = b""

    def feed(self, received: bytes) -> bytes:
        """Return the lines that `received` completes, prefixed."""
        *lines, self._partial = (self._partial + received).split(b"\n")
        if len(self._partial) >= _LINE_BYTES_MAX:
            lines.append(self._partial)
            self._partial = b""
        return b"".join(self._prefix + line + b"\n" for line in lines)

    def flush(self) -> bytes:
        """Return the last line if it has no end, after the stream has ended."""
        return self.feed(b"\n") if self._partial else b""


class PrefixingReader(asyncio.Protocol):
    """Copies one pipe to one stream of ours, line by line."""

    def __init__(
        self, prefixer: LinePrefixer, target: BinaryIO, on_end: Callable[[], None]
    ) -> None:
        self._prefixer = prefixer
        self._target = target
        self._on_end = on_end

    def data_received(self, data: bytes) -> None:
        """Write the lines that are complete."""
        self._write(self._prefixer.feed(data))

    def connection_lost(self, exc: Exception | None) -> None:
        """Write the rest."""
        self._write(self._prefixer.flush())
        self._on_end()

    def _write(self, lines: bytes) -> None:
        if lines:
            self._target.write(lines)
            self._target.flush()
