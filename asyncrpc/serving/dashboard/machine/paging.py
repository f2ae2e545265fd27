"""Sorts rows and takes a page of them, a few rows at a time.

A group of a thousand workers has tens of thousands of rows.  Sorting them at once would
hold the event loop for too long; so the work is a generator, which yields after each
slice of `SLICE_MAX`, and other tasks run between two slices.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

from asyncrpc.serving.dashboard.machine.query import ViewQuery
from asyncrpc.tools.inspection.machine.slices import SLICE_MAX, Slices, parts_of

Row: TypeAlias = Mapping[str, Any]


class RowsPage(NamedTuple):
    """A page of rows.

    Attributes:
        total: how many rows there are on all pages.
        first: index of the first row of the page, from 1; 0 if the page is empty.
    """

    rows: list[Row]
    total: int
    first: int


def page_of(
    rows: Iterable[Row], query: ViewQuery, owners: tuple[str, ...] = ("worker",)
) -> Slices[RowsPage]:
    """Return a page of rows, in slices."""
    begin = (query.page - 1) * query.per_page
    end = begin + query.per_page
    runs: list[list[tuple[_Rank, Row]]] = []
    total = 0
    for part in parts_of(rows):
        run = [
            (_rank(row, query), row) for row in part if _is_wanted(row, query, owners)
        ]
        run.sort(key=_by_rank)
        total += len(run)
        del run[end:]  # no more of a run is needed
        if run:
            runs.append(run)
        yield len(part)
    ordered = _merged(runs)
    for passed in range(0, min(begin, total), SLICE_MAX):
        count = min(SLICE_MAX, begin - passed)
        yield sum(1 for _ in islice(ordered, count))
    shown = [row for _, row in islice(ordered, query.per_page)]
    for run in runs:
        yield len(run)
        run.clear()
    return RowsPage(shown, total, begin + 1 if shown else 0)


_Rank: TypeAlias = tuple[bool, Any]


def _merged(runs: list[list[tuple[_Rank, Row]]]) -> Iterator[tuple[_Rank, Row]]:
    return heapq.merge(*runs, key=_by_rank)


def _by_rank(item: tuple[_Rank, Row]) -> _Rank:
    return item[0]


class _Down:
    """A value that is sorted in reverse order."""

    __slots__ = ("value",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: Any) -> None:
        self.value = value

    def __lt__(self, other: _Down) -> bool:
        is_less: bool = other.value < self.value
        return is_less

    def __eq__(self, other: object) -> bool:
        """Return whether the values are equal: then rows stay in their order."""
        return isinstance(other, _Down) and bool(other.value == self.value)


def _rank(row: Row, query: ViewQuery) -> _Rank:
    """Return the sort key of a row: unknown values are last in both orders."""
    value = row.get(query.sort)
    if value is None:
        return True, 0
    if isinstance(value, (list, tuple)):
        value = len(value)
    if query.is_up:
        return False, value
    # Numbers are compared by the interpreter itself, ten times as fast.
    return False, -value if isinstance(value, (int, float)) else _Down(value)


def _is_wanted(row: Row, query: ViewQuery, owners: tuple[str, ...]) -> bool:
    if query.workers and query.workers.isdisjoint(_names_in(row, owners)):
        return False
    if not query.find:
        return True
    return any(
        query.find in value.casefold()
        for value in row.values()
        if isinstance(value, str)
    )


def _names_in(row: Row, owners: tuple[str, ...]) -> Iterator[str]:
    """Yield the names of workers that a row has."""
    for owner in owners:
        value = row.get(owner)
        if isinstance(value, str):
            yield value
        elif value is not None:
            yield from value
