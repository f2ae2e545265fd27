"""Passes by suite and class, as a table for a terminal, a log or a page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.table import Table

from tests.conformance.lists import Class, Known
from tests.conformance.results import Result, Status

HEADINGS = ("suite", "class a", "class b", "class c", "all", "skipped")


def rows(
    results: Mapping[str, Result], known: Mapping[str, Known]
) -> Iterator[tuple[str, ...]]:
    """Yield the passes of each suite, by class, and those of all suites together."""
    for suite in dict.fromkeys(known[name].suite for name in results):
        yield _row(
            suite, [one for one in results if known[one].suite == suite], results, known
        )
    yield _row("all", list(results), results, known)


def table(results: Mapping[str, Result], known: Mapping[str, Known]) -> Table:
    made = Table(*HEADINGS)
    for column in made.columns[1:]:
        column.justify = "right"
    *suites, total = rows(results, known)
    for row in suites:
        made.add_row(*row)
    made.add_section()
    made.add_row(*total)
    return made


def markdown(results: Mapping[str, Result], known: Mapping[str, Known]) -> str:
    lines = [HEADINGS, ("---", *("---:" for _ in HEADINGS[1:]))]
    return "\n".join(
        f"| {' | '.join(row)} |" for row in (*lines, *rows(results, known))
    )


def _row(
    title: str,
    names: list[str],
    results: Mapping[str, Result],
    known: Mapping[str, Known],
) -> tuple[str, ...]:
    parts = [[one for one in names if known[one].of_class is part] for part in Class]
    skipped = sum(results[name].status is Status.SKIP for name in names)
    passes = (_passes(part, results) for part in (*parts, names))
    return (title, *passes, str(skipped or ""))


def _passes(names: list[str], results: Mapping[str, Result]) -> str:
    status = [results[name].status for name in names]
    counted = len(names) - status.count(Status.SKIP)
    return f"{status.count(Status.PASS)} of {counted}" if counted else ""
