"""What started processes print: line by line, each with the name of its process."""

from __future__ import annotations

from typing import Final

# A process that never ends its line must not fill our memory.
_LINE_BYTES_MAX: Final = 1 << 16
_COLOURS: Final = (36, 33, 32, 35, 34, 31)  # ANSI: cyan, yellow, green, ...


def prefix_of(label: str, number: int, *, is_coloured: bool) -> bytes:
    """Return the prefix of each line of a process.

    Args:
        label: its name or rank.
        number: chooses its colour.
    """
    shown = f"[{label}]".encode()
    if not is_coloured:
        return shown + b" "
    return b"\x1b[%dm%b\x1b[0m " % (_COLOURS[number % len(_COLOURS)], shown)


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
