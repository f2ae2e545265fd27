"""What a person sees of a run: how far it has come, and what it found."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

from tests.conformance import tables
from tests.conformance.lists import Known
from tests.conformance.results import Report, Result
from tests.conformance.verdict import Verdict

DRAW_S: Final = 0.2
LINE_TESTS: Final = 25  # between two lines, where there is no terminal
LINE_CHARACTERS_MAX: Final = 240


class Bar:
    """How far it has come, on a terminal or in a log.

    It is drawn by `poll` and by no thread: this process forks.
    """

    def __init__(self, console: Console) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        self.progress = Progress(*columns, console=console, auto_refresh=False)
        self._console = console
        self._task = self.progress.add_task("tests", total=None)
        self._done = self._total = self._good = 0
        self._drawn_s = 0.0

    def begin(self, title: str, total: int) -> None:
        self._done, self._total, self._good = 0, total, 0
        self.progress.reset(self._task, total=total, description=title)

    def poll(self) -> None:
        if self._console.is_terminal and time.monotonic() > self._drawn_s + DRAW_S:
            self._drawn_s = time.monotonic()
            self.progress.refresh()

    def ended(self, name: str, result: Result) -> None:
        self._done += 1
        self._good += result.is_good
        self.progress.update(self._task, completed=self._done)
        if not result.is_good:
            self._console.print(line(name, result), markup=False, soft_wrap=True)
        is_round = not self._done % LINE_TESTS or self._done == self._total
        if is_round and not self._console.is_terminal:
            self._console.print(f"{self._done} of {self._total}: {self._good} good")


def line(name: str, result: Result) -> str:
    said = f"{result.status:7} {result.seconds:6.1f} s  {name}  {result.message}"
    return said[:LINE_CHARACTERS_MAX]


def conclude(
    report: Report,
    known: Mapping[str, Known],
    listed: Mapping[str, str],
    verdict: Verdict,
    console: Console,
) -> None:
    """Print the table, then what needs a word, and the verdict last."""

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    console.print(tables.table(report.results, known))
    for name, result in report.results.items():
        if result.flaky:
            say(f"passed when it was run again: {name}")
    for name in verdict.excused:
        say(f"listed: {name}: {listed[name]}")
    for name in verdict.outdated:
        say(f"listed and passes: take it out: {name}")
    if verdict.unexpected:
        say(f"\n{len(verdict.unexpected)} did not pass, and must:")
    for name in verdict.unexpected:
        say(f"{known[name].of_class} {line(name, report.results[name])}")
    for name, tests in missing_names(report.results.values()):
        say(f"not provided, met by {tests} tests: {name}")
    for name in report.about.get("not_classified", ()):
        say(f"has no class in classification.json, and is not run: {name}")
    took_s = report.about["seconds"]
    say(f"{'in order' if verdict.is_good else 'not in order'}, {took_s:.0f} s")


def missing_names(results: Iterable[Result]) -> list[tuple[str, int]]:
    """Return the names that the implementation lacks, those most tests use first."""
    return Counter(name for result in results for name in result.missing).most_common()
