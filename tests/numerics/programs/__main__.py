"""Many random programs: `python -m tests.numerics.programs --programs 10000`.

The exit status is 0 if each had the gradients of one process.  One that had not is made
as short as it can be, and printed as the expression that makes it.
"""

from __future__ import annotations

import argparse
import sys
import time

from hypothesis import HealthCheck, Phase, given, seed, settings
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from tests.numerics.programs.drawing import programs
from tests.numerics.programs.language import Program
from tests.numerics.programs.running import Comparison, Tally

LINE_PROGRAMS = 1000  # between two lines, where there is no terminal


class Run:
    """Programs one after the other, and what kinds they are."""

    def __init__(self, comparison: Comparison, bar: Bar) -> None:
        self.tally = Tally()
        self.done = 0
        self._comparison = comparison
        self._bar = bar

    def check(self, program: Program) -> None:
        self.tally.add(program, self._comparison.check(program))
        self.done += 1
        self._bar.show(self.done)


class Bar:
    """How far it has come, on a terminal or in a log."""

    def __init__(self, console: Console, total: int) -> None:
        columns = (
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self.progress = Progress(*columns, console=console)
        self._console = console
        self._task = self.progress.add_task("programs", total=total)

    def show(self, done: int) -> None:
        self.progress.update(self._task, completed=done)
        if not done % LINE_PROGRAMS and not self._console.is_terminal:
            self._console.print(f"{done:,} programs")


def run(count: int, number: int, console: Console) -> int:
    """Run so many programs; return the exit status."""
    begun_s, bar = time.monotonic(), Bar(console, count)
    with Comparison() as comparison, bar.progress:
        ran = Run(comparison, bar)

        @seed(number)
        @settings(
            max_examples=count,
            database=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
            deadline=None,
        )
        @given(programs())
        def check(program: Program) -> None:
            ran.check(program)

        try:
            check()
        except Exception as error:  # noqa: BLE001  (whatever it is, it is shown)
            console.print(f"{type(error).__name__}: {error}", markup=False)
            console.print(*getattr(error, "__notes__", []), sep="\n", markup=False)
            console.print(f"again: --programs {count} --seed {number}")
            return 1
    console.print(ran.tally.table(ran.done, time.monotonic() - begun_s))
    return 0


def main() -> int:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.numerics.programs")
    parser.add_argument("--programs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    return run(options.programs, options.seed, Console(highlight=False))


if __name__ == "__main__":
    sys.exit(main())
