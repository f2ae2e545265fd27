"""How quickly does a program start workers and call them, beside Ray and dask?

    $ make bench-clusters             # in .venv-peers, which has all of them
    $ .venv-peers/bin/python -m tests.bench.bench_clusters --starts 1 --seconds 0.1

Each start is a fresh program for each library; the three take turns.  A start ends once
every worker has computed with torch.  An object is a class of the program; the lambda
closes over a number.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Final

from tests.bench import machine, pages
from tests.bench.harness import Figure, Row, aligned, times_as_good
from tests.bench.processes import say

STARTS: Final = 3
SECONDS: Final = 0.7  # per workload and start
SIDES: Final = ("asyncrpc", "ray", "dask")
PACKAGES: Final = ("ray", "distributed")
ROWS: Final = {
    "start_1": Row("start 1 worker", "s"),
    "start_8": Row("start 8 workers", "s"),
    "start_32": Row("start 32 workers", "s"),
    "one": Row("method, one at a time", "calls/s", higher_is_better=True),
    "many": Row("method, 256 outstanding", "calls/s", higher_is_better=True),
    "fan_8": Row("method of 8 objects", "rounds/s", higher_is_better=True),
    "fan_64": Row("method of 64 objects", "rounds/s", higher_is_better=True),
    "closure": Row("lambda, one at a time", "calls/s", higher_is_better=True),
}
_HANGS_S: Final = 300.0

Figures = Mapping[str, Figure | None]  # by side


def measured(side: str, seconds: float) -> dict[str, float]:
    """Return what one fresh program of a library measures, by the name of the row."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.bench.clusters.{side}_side", str(seconds)],
        capture_output=True,
        text=True,
        check=False,
        timeout=_HANGS_S,
    )
    if done.returncode:
        say(f"{side} failed:\n{done.stderr[-2000:]}")
        return {}
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def table(results: Sequence[tuple[Row, Figures]]) -> str:
    """Return the rows: text to the left, numbers to the right."""
    lines = [["workload", "unit", *SIDES, "ratio"]]
    for row, figures in results:
        ours, *others = (figures[side] for side in SIDES)
        times = times_as_good(row, ours, others)
        shown = (str(figures[side] or "-") for side in SIDES)
        ratio = "-" if times is None else f"{times:.2f}"
        lines.append([row.name, row.unit, *shown, ratio])
    return aligned(lines)


def main() -> None:
    parser = pages.parser(__doc__, STARTS)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    options = parser.parse_args()
    begun_s, load = time.monotonic(), machine.load()
    starts: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for number in range(options.starts):
        for side in SIDES:
            say(f"start {number + 1} of {options.starts}: {side}")
            starts[side].append(measured(side, options.seconds))
    results = []
    for name, row in ROWS.items():
        figures: dict[str, Figure | None] = {}
        for side in SIDES:
            values = tuple(start[name] for start in starts[side] if name in start)
            figures[side] = Figure(values) if values else None
        results.append((row, figures))
    text = (
        f"{table(results)}\n\nmedians (least-most) over {options.starts} starts of"
        f" each, {options.seconds:g} s a workload and start; ratio over 1:\nasyncrpc"
        f" does better than the best of the others.  {machine.versions(PACKAGES)}"
    )
    print(f"{machine.describe()}, load {load:g} before the run\n\n{text}")
    if options.update_docs:
        pages.renew("clusters", pages.as_block(text))
    say(f"{time.monotonic() - begun_s:.0f} s")


if __name__ == "__main__":
    main()
