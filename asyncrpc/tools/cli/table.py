"""Tables for terminals: aligned columns, within the available width."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from itertools import chain, repeat, zip_longest
from typing import Final

from asyncrpc.core.logs import printable

NARROWEST: Final = 8  # to which a column may be cut
UNCUT: Final = 1 << 30  # as the width of a table that is shown whole
_GAP: Final = "  "


def lines_of(
    rows: Sequence[Sequence[str]], *, width: int | None = None, wraps: bool = False
) -> list[str]:
    """Return rows as lines, each column as wide as its widest cell.

    Cells that do not fit are cut, the widest column first.

    Args:
        width: characters of a line; None: those of the terminal, or 80 without one.
    """
    if not rows:
        return []
    rows = [[printable(cell) for cell in row] for row in rows]
    room = width or columns_here()
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    gaps = len(_GAP) * (len(widths) - 1)
    while sum(widths) + gaps > room and max(widths) > NARROWEST:
        widths[widths.index(max(widths))] -= 1
    shown = chain.from_iterable(map(_wrapped, rows, repeat(widths))) if wraps else rows
    return [
        _GAP.join(
            _cut(cell, wide).ljust(wide) for cell, wide in zip(row, widths, strict=True)
        ).rstrip()
        for row in shown
    ]


def line_of(text: str) -> str:
    """Return a line cut to the width of the terminal.

    If the output is not a terminal, the line is left whole, for programs and files.
    """
    text = printable(text)
    return _cut(text, columns_here()) if sys.stdout.isatty() else text


def wrapped(text: str) -> str:
    """Return a sentence wrapped to the terminal; whole without a terminal."""
    text = printable(text)
    if not sys.stdout.isatty():
        return text
    return textwrap.fill(
        text, columns_here(), subsequent_indent="  ", break_on_hyphens=False
    )


def columns_here() -> int:
    """Return the characters of a line of the terminal; 80 if there is none."""
    return shutil.get_terminal_size((80, 24)).columns


def _wrapped(row: Sequence[str], widths: Sequence[int]) -> Iterator[Sequence[str]]:
    """Yield a row as several rows, so that no cell is cut."""
    cells = [
        textwrap.wrap(cell, wide, break_on_hyphens=False)
        for cell, wide in zip(row, widths, strict=True)
    ]
    yield from zip_longest(*cells, fillvalue="")


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"
