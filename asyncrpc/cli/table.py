"""Tables for terminals: columns that line up, in the width that there is."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import Final

NARROWEST: Final = 8  # to which a column may be cut
UNCUT: Final = 1 << 30  # as the width of a table that is shown whole
_GAP: Final = "  "


def lines_of(rows: Sequence[Sequence[str]], *, width: int | None = None) -> list[str]:
    """Return rows as lines, each column as wide as its widest cell.

    Cells that do not fit are cut, the widest column first.

    Args:
        rows: the first is the heading.
        width: characters of a line; None: those of the terminal, 80 if it is none.
    """
    if not rows:
        return []
    room = width or shutil.get_terminal_size((80, 24)).columns
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    gaps = len(_GAP) * (len(widths) - 1)
    while sum(widths) + gaps > room and max(widths) > NARROWEST:
        widths[widths.index(max(widths))] -= 1
    return [
        _GAP.join(
            _cut(cell, wide).ljust(wide) for cell, wide in zip(row, widths, strict=True)
        ).rstrip()
        for row in rows
    ]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"
