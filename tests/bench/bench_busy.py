"""What does a call cost beside a thread that computes, in microseconds?

The event loop needs the GIL for every message.  A thread in pure Python gives it away
only when its switch interval is over, by default 5 ms, each time the loop has slept;
one in torch gives it away for as long as an operator runs.  The load runs in one thread
of the callee or of the caller; the other process has nothing else to do.  The last
column is what the calls leave to the load, against its speed when there are none.

    $ make bench ONLY=busy
    $ python -m tests.bench.bench_busy --switch-ms 5 0.5 --starts 3
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

from tests.bench import pages
from tests.bench.harness import short
from tests.bench.processes import reports, say

MODULE: Final = "tests.bench.sides.busy_side"
HEADS: Final = ("async def p50", "p99", "def p50", "p99", "load keeps, %")


def table(results: Mapping[tuple[str, str], Sequence[Sequence[float]]]) -> str:
    """Return a line per switch interval and load: medians over starts."""
    titles = ("switch, ms", "load")
    heads = "".join(f"{head:>15}" for head in HEADS)
    lines = [f"{titles[0]:<12}{titles[1]:<24}{heads}"]
    for (interval, load), starts in results.items():
        medians = [statistics.median(column) for column in zip(*starts, strict=True)]
        cells = "".join(f"{short(median):>15}" for median in medians)
        lines.append(f"{interval:<12}{load:<24}{cells}")
    return "\n".join(lines)


def main() -> None:
    parser = pages.parser(__doc__, 1)
    parser.add_argument("--seconds", type=float, default=0.6, help="per cell")
    parser.add_argument("--switch-ms", type=float, nargs="+", default=[5, 1, 0.5, 0.1])
    options = parser.parse_args()
    intervals = [f"{switch_ms:g}" for switch_ms in options.switch_ms]
    arguments = ["--seconds", str(options.seconds), "--switch-ms", *intervals]
    results: dict[tuple[str, str], list[list[float]]] = defaultdict(list)
    for start in range(options.starts):
        say(f"start {start + 1} of {options.starts}")
        for interval, (load, figures, share) in reports(
            MODULE, arguments, limit_s=600.0
        ):
            results[interval, load].append([*figures, 100 * share])
    text = table(results)
    pages.show("busy", text, options)


if __name__ == "__main__":
    main()
