"""What a notebook shows of an object: a title and a table, as HTML.

It takes texts and numbers, and escapes them.  Colours are the page's own, so that it
reads on light and on dark ones; only the dots of states have a colour, and each stands
beside its word.  Every `_repr_html_` calls it; that must not wait, so it shows what is
known here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Final, Literal, NamedTuple, TypeAlias

ROWS_MAX: Final = 64  # of a table; a cluster may have thousands of workers
TEXT_MAX: Final = 400  # characters of a cell

Tone: TypeAlias = Literal["good", "busy", "bad", "off"]
_COLOURS: Final[Mapping[str, str]] = {
    "good": "#2e9e5b",
    "busy": "#d99a1c",
    "bad": "#d64545",
    "off": "#8a8a8a",
}
_LINE: Final = "1px solid rgba(128,128,128,.3)"
_BOX: Final = (
    f"display:inline-block;box-sizing:border-box;max-width:100%;border:{_LINE};"
    "border-radius:6px;padding:8px 12px;margin:2px 0;font-size:13px;line-height:1.5;"
    "overflow-x:auto;vertical-align:top"
)
_TABLE: Final = "border-collapse:collapse;border:none;margin:6px 0 0;font-size:inherit"
# A page may shade the rows of its tables, and align all cells alike.
_ROW: Final = "background:transparent"
_CELL: Final = (
    "padding:2px 16px 2px 0;border:none;vertical-align:top;white-space:pre-wrap;"
    "max-width:60em;overflow-wrap:anywhere;background:transparent"
)
_DIM: Final = "opacity:.6"


class State(NamedTuple):
    """A cell with a coloured dot, a word, and what there is to say of it."""

    word: str
    tone: Tone
    why: str = ""


Cell: TypeAlias = str | int | float | State | None


def panel(
    title: str,
    about: str = "",
    *,
    columns: Sequence[str] = (),
    rows: Iterable[Sequence[Cell]] = (),
    note: str = "",
) -> str:
    """Return a title and a table.

    Args:
        about: beside the title.
        columns: the heads; none: the first cell of each row is its head.
        rows: beyond `ROWS_MAX` they are counted.
        note: below the table.
    """
    rows = list(rows)
    parts = [f"<div><b>{escape(title)}</b>"]
    if about:
        parts.append(f'<span style="{_DIM};margin-left:8px">{escape(about)}</span>')
    parts.append("</div>")
    if rows:
        parts.append(_table(columns, rows[:ROWS_MAX]))
    if len(rows) > ROWS_MAX:
        note = f"and {len(rows) - ROWS_MAX:,} more{note and f'; {note}'}"
    if note:
        parts.append(f'<div style="{_DIM};margin-top:4px">{escape(note)}</div>')
    return f'<div style="{_BOX}">{"".join(parts)}</div>'


def _table(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    lines = []
    if columns:
        numbers = {i for row in rows for i, cell in enumerate(row) if _is_number(cell)}
        heads = (_head(text, i in numbers) for i, text in enumerate(columns))
        lines.append(f'<tr style="{_ROW};border-bottom:{_LINE}">{"".join(heads)}</tr>')
        bodies = ("".join(map(_cell, row)) for row in rows)
    else:
        bodies = (
            f"{_head(str(head))}{''.join(map(_cell, row))}" for head, *row in rows
        )
    lines += (f'<tr style="{_ROW}">{body}</tr>' for body in bodies)
    return f'<table style="{_TABLE}">{"".join(lines)}</table>'


def _is_number(cell: Cell) -> bool:
    return isinstance(cell, int | float)


def _head(text: str, is_number: bool = False) -> str:  # noqa: FBT001, FBT002
    style = f"{_CELL};font-weight:normal;text-align:{'right' if is_number else 'left'}"
    return f'<th style="{style}"><span style="{_DIM}">{escape(text)}</span></th>'


def _cell(cell: Cell) -> str:
    side = "right;font-variant-numeric:tabular-nums" if _is_number(cell) else "left"
    return f'<td style="{_CELL};text-align:{side}">{_content(cell)}</td>'


def _content(cell: Cell) -> str:
    match cell:
        case None:
            return f'<span style="{_DIM}">&ndash;</span>'
        case State(word, tone, why):
            dot = f'<span style="color:{_COLOURS[tone]}">●</span> '
            more = f' <span style="{_DIM}">{escape(why[:TEXT_MAX])}</span>'
            return f"{dot}{escape(word)}{more if why else ''}"
        case int():
            return f"{cell:,}"
        case float():
            return f"{cell:,.1f}"
    return escape(cell if len(cell) <= TEXT_MAX else f"{cell[:TEXT_MAX]}…")
