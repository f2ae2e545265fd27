"""The report of a chaos run, for a terminal."""

from __future__ import annotations

from typing import Final

from rich.console import Console
from rich.table import Table

from tests.chaos.log import End
from tests.chaos.run import Report

EXAMPLES_MAX: Final = 5  # of each thing that should not have been
INNOCENT_MAX: Final = 20  # pairs and kinds of calls
_NUMBERS: Final = frozenset(
    {"times", "logged", "not logged", "calls", "made", "own error", "late"}
    | {"fault", "given up", "else", "is"}
)


def show(report: Report) -> None:
    """Print it."""
    console = Console(highlight=False)
    console.print(
        f"{report.calls:,} calls, {report.lives} processes, {report.took_s:.0f} s, "
        f"seed {report.settings.seed}, over {report.wires}"
        + (f" (without: {', '.join(sorted(report.lacking))})" if report.lacking else "")
    )
    console.print(_injected(report))
    console.print(_outcomes(report))
    console.print(_errors(report))
    console.print(_mistakes(report))
    console.print(_causes(report))
    if report.verdict.losses.innocent:
        console.print(_innocent(report))
    console.print(_verdict(report))
    for name, lines in report.verdict.lines.items():
        for words in lines[:EXAMPLES_MAX]:
            console.print(f"- {name}: {words}", markup=False)


def _table(*columns: str, title: str) -> Table:
    """Return a table whose numbers line up."""
    table = Table(title=title, title_justify="left", min_width=len(title) + 2)
    for index, column in enumerate(columns):
        is_number = column in _NUMBERS and index
        table.add_column(column, justify="right" if is_number else "left")
    return table


def _injected(report: Report) -> Table:
    table = _table("fault", "times", title="What was broken")
    for kind, times in sorted(report.injected.items()):
        table.add_row(kind, f"{times:,}")
    return table


def _outcomes(report: Report) -> Table:
    table = _table("claimed", "logged", "not logged", title="Outcomes of calls")
    for outcome in ("EXECUTED", "NOT_EXECUTED", "UNKNOWN"):
        counts = [report.verdict.outcomes[outcome, ran] for ran in (True, False)]
        table.add_row(outcome, *(f"{count:,}" for count in counts))
    return table


def _errors(report: Report) -> Table:
    table = _table("error", "calls", title="Ends of right calls")
    for error, count in report.verdict.errors.most_common():
        table.add_row(error, f"{count:,}")
    return table


def _mistakes(report: Report) -> Table:
    """Of each kind: how many, and how they ended; the last column is a finding."""
    mistakes = report.mistakes
    by = ", ".join(sorted(mistakes.workers)) or "nobody"
    table = _table(
        *("mistake", "made", "own error", "late", "fault", "given up", "else"),
        title=f"Mistakes, by {by}; by up to {mistakes.at_once} at once",
    )
    for kind, count in sorted(mistakes.counts.items()):
        ends = [mistakes.ends[kind, end] for end in End]
        expected, late, lost, strange = ends
        given_up = count - sum(ends)
        numbers = (count, expected, late, lost, given_up, strange)
        table.add_row(kind, *(f"{number:,}" for number in numbers))
    return table


def _causes(report: Report) -> Table:
    losses = report.verdict.losses
    table = _table("cause", "calls", title="Why calls were lost")
    for cause, count in losses.causes.most_common():
        table.add_row(cause, f"{count:,}")
    table.add_row("none", f"{losses.innocent.total():,}")
    return table


def _innocent(report: Report) -> Table:
    table = _table("pair", "call", "error", "calls", title="Lost without a fault")
    innocent = report.verdict.losses.innocent
    shown = innocent.most_common(INNOCENT_MAX)
    for (pair, what, error), count in shown:
        table.add_row(pair, what, error, f"{count:,}")
    rest = innocent.total() - sum(count for _, count in shown)
    if rest:
        table.add_row("others", "", "", f"{rest:,}")
    return table


def _verdict(report: Report) -> Table:
    table = _table("must be 0", "is", title="Verdict")
    for name, lines in report.verdict.lines.items():
        style = "bold red" if lines else "green"
        table.add_row(name, f"[{style}]{len(lines)}[/]")
    return table
