"""What do metrics cost?

Calls per second between two processes, with metrics counted at both ends and without,
in turn, many times in each of several starts.  A ratio of 0.97 says that a worker makes
3 % fewer calls while its metrics are counted.

    $ python -m tests.bench.bench_metrics --starts 5
    $ python -m tests.bench.bench_metrics --starts 5 --update-docs
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

from tests.bench import pages
from tests.bench.processes import reports, say

MODULE: Final = "tests.bench.sides.metrics_side"


def table(found: Mapping[str, Sequence[Mapping[str, list[float]]]]) -> str:
    """Return a line for each kind of calls."""
    lines = [f"{'calls':<20}{'off, 1/s':>12}{'on, 1/s':>12}{'on / off':>26}"]
    for name, starts in found.items():
        medians = [
            {wanted: statistics.median(rates) for wanted, rates in start.items()}
            for start in starts
        ]
        ratios = sorted(one["on"] / one["off"] for one in medians)
        off, on = (statistics.median(one[w] for one in medians) for w in ("off", "on"))
        ratio = f"{statistics.median(ratios):.3f} ({ratios[0]:.3f}-{ratios[-1]:.3f})"
        lines.append(f"{name:<20}{off:>12,.0f}{on:>12,.0f}{ratio:>26}")
    lines += ["", "medians over starts; of the ratio also the least and the most"]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=6, help="of each, per start")
    parser.add_argument("--seconds", type=float, default=0.5, help="per round")
    parser.add_argument("--update-docs", action="store_true")
    options = parser.parse_args()
    found: dict[str, list[Mapping[str, list[float]]]] = defaultdict(list)
    for start in range(options.starts):
        say(f"start {start + 1} of {options.starts}")
        arguments = [f"--rounds={options.rounds}", f"--seconds={options.seconds}"]
        for name, figures in reports(MODULE, arguments):
            found[name] += figures
    text = table(found)
    print(text)
    if options.update_docs:
        pages.renew("metrics", pages.as_block(text))


if __name__ == "__main__":
    main()
