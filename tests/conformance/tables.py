"""Passes by suite and class, as a table for a terminal, a log or a page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.table import Table

from tests.conformance.lists import Class, Known
from tests.conformance.results import Result, Status

Shown = tuple[Class, ...]


def classes_of(results: Mapping[str, Result], known: Mapping[str, Known]) -> Shown:
    """Return the classes that tests of a run are of, in their order."""
    met = {known[name].of_class for name in results}
    return tuple(of_class for of_class in Class if of_class in met)


def headings(shown: Shown) -> tuple[str, ...]:
    return ("suite", *(f"class {of_class}" for of_class in shown), "all", "skipped")


def rows(
    results: Mapping[str, Result], known: Mapping[str, Known]
) -> Iterator[tuple[str, ...]]:
    """Yield the passes of each suite, by class, and those of all suites together."""
    shown = classes_of(results, known)
    for suite in dict.fromkeys(known[name].suite for name in results):
        names = [result for result in results if known[result].suite == suite]
        yield _row(suite, names, results, known, shown)
    yield _row("all", list(results), results, known, shown)


def table(results: Mapping[str, Result], known: Mapping[str, Known]) -> Table:
    grid = Table(*headings(classes_of(results, known)))
    for column in grid.columns[1:]:
        column.justify = "right"
    *suites, total = rows(results, known)
    for row in suites:
        grid.add_row(*row)
    grid.add_section()
    grid.add_row(*total)
    return grid


def markdown(results: Mapping[str, Result], known: Mapping[str, Known]) -> str:
    titles = headings(classes_of(results, known))
    lines = [titles, ("---", *("---:" for _ in titles[1:]))]
    return "\n".join(
        f"| {' | '.join(row)} |" for row in (*lines, *rows(results, known))
    )


def _row(
    title: str,
    names: list[str],
    results: Mapping[str, Result],
    known: Mapping[str, Known],
    shown: Shown,
) -> tuple[str, ...]:
    parts = [[name for name in names if known[name].of_class is part] for part in shown]
    skipped = sum(results[name].status is Status.SKIP for name in names)
    passes = (_passes(part, results) for part in (*parts, names))
    return (title, *passes, str(skipped or ""))


def _passes(names: list[str], results: Mapping[str, Result]) -> str:
    status = [results[name].status for name in names]
    counted = len(names) - status.count(Status.SKIP)
    return f"{status.count(Status.PASS)} of {counted}" if counted else ""
