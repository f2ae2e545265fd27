"""Runs pairs of processes with something and without it, in turn, and compares them."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from tests.bench import pages
from tests.bench.harness import short
from tests.bench.processes import reports, say

# Of on and off, the figures of each round.
Start: TypeAlias = Mapping[str, Sequence[Sequence[float]]]


def row(name: str, starts: Sequence[Start], figure: int) -> str:
    """Return a line of the table."""
    medians = [
        {
            wanted: statistics.median(figures[figure] for figures in rounds)
            for wanted, rounds in start.items()
        }
        for start in starts
    ]
    ratios = sorted(median["on"] / median["off"] for median in medians)
    off, on = (
        statistics.median(median[w] for median in medians) for w in ("off", "on")
    )
    ratio = f"{statistics.median(ratios):.3f} ({ratios[0]:.3f}-{ratios[-1]:.3f})"
    return f"{name:<36}{short(off):>10}{short(on):>10}{ratio:>22}"


def table(results: Mapping[str, Sequence[Start]]) -> str:
    """Return two lines for each kind of calls."""
    lines = [f"{'calls':<36}{'off':>10}{'on':>10}{'on / off':>22}"]
    alone = results.get("one process", ())
    for name, starts in results.items():
        if starts is not alone:
            lines.append(row(f"{name}, 1/s", starts, 0))
            lines.append(row(f"{name}, us of processor time", starts, 1))
    if alone:
        lines.append(row("the same in one process, the least", alone, 0))
    return "\n".join([*lines, "", "medians over starts; of the ratio also its range"])


def compare(what: str, description: str | None, *, rounds: int, seconds: float) -> None:
    """Run a pair with and without something, in turn, as the command line says.

    Args:
        what: of `sides.on_and_off`, and the part of the page.
        rounds: of each, in a start.
    """
    parser = pages.parser(description, 3)
    parser.add_argument("--rounds", type=int, default=rounds, help="of each, per start")
    parser.add_argument("--seconds", type=float, default=seconds, help="per round")
    options = parser.parse_args()
    module = "tests.bench.sides.on_and_off"
    results: dict[str, list[Start]] = defaultdict(list)
    for start in range(options.starts):
        say(f"start {start + 1} of {options.starts}")
        arguments = [f"--what={what}", f"--rounds={options.rounds}"]
        arguments.append(f"--seconds={options.seconds}")
        for name, figures in reports(module, arguments):
            results[name] += figures
    text = table(results)
    pages.show(what, text, options)
