"""The parts that all answers of the dashboard share, and answers as JSON.

A page of 200 rows and a matrix of 32 workers has ten thousand numbers and texts, which
take several milliseconds to write.  So small parts are written by the fast encoder at
once, and large ones piece by piece.  An unknown number is null, never nan or infinite.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

from asyncrpc.serving.dashboard.machine.paging import RowsPage
from asyncrpc.serving.dashboard.machine.query import ViewQuery
from asyncrpc.tools.inspection.machine.slices import Slices
from asyncrpc.tools.inspection.records import NoAnswer

SILENT_MAX: Final = 50  # are listed; the overview has all
PIECE_MAX: Final = 100  # numbers, texts, lists and objects that are written at once
VALUES_MAX: Final = 500  # of one slice: half a millisecond
_ENCODER: Final = json.JSONEncoder(allow_nan=False)  # JSON has no nan


def heading_of(
    view: str,
    *,
    taken_at_s: float,
    took_s: float,
    every_s: float,
    workers: int,
    silent: Mapping[str, NoAnswer],
) -> dict[str, Any]:
    """Return the heading of an answer."""
    names = sorted(silent)
    return {
        "view": view,
        "taken_at_s": taken_at_s,
        "took_s": took_s,
        "every_s": every_s,
        "group": {
            "workers": workers,
            "answering": workers - len(silent),
            "silent": len(silent),
        },
        "silent": [
            {
                "worker": name,
                "trouble": silent[name].trouble.name.lower(),
                "why": silent[name].text,
            }
            for name in names[:SILENT_MAX]
        ],
        "silent_left_out": max(0, len(names) - SILENT_MAX),
    }


def listing_of(page: RowsPage, query: ViewQuery, left_out: int = 0) -> dict[str, Any]:
    """Return the part of an answer for a page of rows."""
    return {
        "rows": page.rows,
        "total": page.total,
        "first": page.first,
        "left_out": left_out,
        "page": query.page,
        "per_page": query.per_page,
        "sort": query.sort,
        "order": "up" if query.is_up else "down",
    }


# --- numbers --------------------------------------------------------------------------


def known(value: float) -> float | None:
    """Return a number; None if it is nan or infinite."""
    return value if math.isfinite(value) else None


def known_age(value: float) -> float | None:
    """Return a number of seconds; None if it is not known."""
    return value if math.isfinite(value) and value >= 0 else None


def known_bytes(value: int) -> int | None:
    """Return a number of bytes; None if it is not known."""
    return None if value < 0 else value


# --- JSON -----------------------------------------------------------------------------


def encoded(answer: Mapping[str, Any]) -> Slices[str]:
    """Return an answer as JSON, in slices."""
    texts: list[str] = []
    done = 0
    for text, count in _pieces(answer):
        texts.append(text)
        done += count
        if done >= VALUES_MAX:
            yield done
            done = 0
    return "".join(texts)


def _pieces(value: Any) -> Iterator[tuple[str, int]]:
    """Yield the JSON of a value in pieces, each with its size in values."""
    count = _size(value)
    if count <= PIECE_MAX or isinstance(value, str):
        yield _ENCODER.encode(value), count
    elif isinstance(value, Mapping):
        before = "{"
        for key, item in value.items():
            yield f"{before}{_ENCODER.encode(key)}: ", 1
            yield from _pieces(item)
            before = ", "
        yield "}", 0
    else:
        before = "["
        for item in value:
            yield before, 0
            yield from _pieces(item)
            before = ", "
        yield "]", 0


def _size(value: Any) -> int:
    """Return the size of a value, counted up to just above `PIECE_MAX`."""
    pending, count = [value], 0
    while pending and count <= PIECE_MAX:
        item = pending.pop()
        count += 1
        if isinstance(item, Mapping):
            pending.extend(item.values())
        elif isinstance(item, (list, tuple)):
            pending.extend(item)
    return count
