"""The parts that all answers of the dashboard share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from asyncrpc.inspection.records import NoAnswer
from asyncrpc.serving.dashboard.machine.paging import RowsPage
from asyncrpc.serving.dashboard.machine.query import ViewQuery

SILENT_MAX: Final = 50  # are listed; the overview has all


def heading_of(
    view: str,
    *,
    taken_at_s: float,
    took_s: float,
    every_s: float,
    workers: int,
    silent: Mapping[str, NoAnswer],
) -> dict[str, Any]:
    """Return the heading of an answer.

    Args:
        view: its name.
        taken_at_s: when the look was complete, in seconds since 1970.
        took_s: seconds that it took.
        every_s: seconds between two looks.
        workers: how many members there are.
        silent: why the others have not answered, by name.
    """
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
    """Return the part of an answer for a page of rows.

    Args:
        page: of the rows.
        query: the query that is answered.
        left_out: how many rows the workers left out.
    """
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
