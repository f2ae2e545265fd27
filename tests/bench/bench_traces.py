"""What do traces cost a call?

One column per way: not turned on; turned on at both ends, by a root that leaves the
trace out; and recorded at both ends, by the SDK of OpenTelemetry, to an exporter that
drops the spans.  Starts of the ways alternate.

    $ make bench ONLY=traces
    $ python -m tests.bench.bench_traces --starts 5 --update-docs
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Final

from tests.bench import pages
from tests.bench.harness import short
from tests.bench.processes import reports, say

MODULE: Final = "tests.bench.sides.traces_side"
WAYS: Final = ("off", "left out", "recorded")


def cell(starts: list[list[Any]]) -> str:
    medians = [statistics.median(column) for column in zip(*starts, strict=True)]
    return " / ".join(map(short, medians))


def table(found: Mapping[str, Mapping[str, list[list[Any]]]]) -> str:
    """Return a line per thing measured, a column per way."""
    lines = [" " * 32 + "".join(f"{way:>18}" for way in WAYS)]
    for name, by_way in found.items():
        cells = [cell(by_way[way]) if way in by_way else "-" for way in WAYS]
        lines.append(f"{name:<32}" + "".join(f"{one:>18}" for one in cells))
    lines += ["", "us: p50 / p99; processor time: caller / callee; medians over starts"]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="per cell")
    parser.add_argument("--update-docs", action="store_true")
    options = parser.parse_args()
    found: dict[str, dict[str, list[list[Any]]]] = defaultdict(dict)
    for start in range(options.starts):
        for way in WAYS:
            say(f"start {start + 1} of {options.starts}: {way}")
            arguments = ["--seconds", str(options.seconds), "--way", way]
            for name, figures in reports(MODULE, arguments):
                found[name].setdefault(way, []).append(figures)
    text = table(found)
    print(text)
    if options.update_docs:
        pages.renew("traces", pages.as_block(text))


if __name__ == "__main__":
    main()
