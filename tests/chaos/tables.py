"""The report of a chaos run, for a terminal."""

from __future__ import annotations

from typing import Final

from rich.console import Console
from rich.table import Table

from tests.chaos.run import Report

EXAMPLES_MAX: Final = 5  # of each thing that should not have been


def show(report: Report) -> None:
    """Print it."""
    console = Console(highlight=False)
    console.print(
        f"{report.calls:,} calls, {report.lives} processes, {report.took_s:.0f} s, "
        f"seed {report.given.seed}, over {report.wires}"
        + (f" (without: {', '.join(sorted(report.lacking))})" if report.lacking else "")
    )
    console.print(_injected(report))
    console.print(_outcomes(report))
    console.print(_errors(report))
    console.print(_verdict(report))
    for name, found in report.verdict.lines.items():
        for words in found[:EXAMPLES_MAX]:
            console.print(f"- {name}: {words}", markup=False)


def _injected(report: Report) -> Table:
    table = Table("fault", "times", title="What was broken")
    for kind, times in sorted(report.injected.items()):
        table.add_row(kind, f"{times:,}")
    return table


def _outcomes(report: Report) -> Table:
    table = Table("claimed", "logged", "not logged", title="Outcomes of calls")
    for outcome in ("EXECUTED", "NOT_EXECUTED", "UNKNOWN"):
        counts = [report.verdict.outcomes[outcome, ran] for ran in (True, False)]
        table.add_row(outcome, *(f"{count:,}" for count in counts))
    return table


def _errors(report: Report) -> Table:
    table = Table("error", "calls", title="What callers were told")
    for error, count in report.verdict.errors.most_common():
        table.add_row(error, f"{count:,}")
    return table


def _verdict(report: Report) -> Table:
    table = Table("must be 0", "is", title="Verdict")
    for name, found in report.verdict.lines.items():
        style = "bold red" if found else "green"
        table.add_row(name, f"[{style}]{len(found)}[/]")
    return table
