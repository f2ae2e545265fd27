"""Where does asyncrpc stand among pyzmq, gRPC, Ray and torch.distributed.rpc?

    $ make bench-peers                # in .venv-peers, which has all of them
    $ make bench-peers UPDATE=1       # and into docs/explanation/performance.md
    $ .venv-peers/bin/python -m tests.bench.bench_peers --starts 1 --seconds 0.1

The workloads, the functions and the values are those of `make bench`; how each library
is driven is in `tests/bench/sides`.  Each start is a fresh set of processes, and the
starts of the five take turns.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Mapping, Sequence
from typing import Final

from tests.bench import machine, pages
from tests.bench import workloads as w
from tests.bench.comparing import Comparison
from tests.bench.harness import Figure, Row, aligned, times_as_good
from tests.bench.processes import say

STARTS: Final = 3
SECONDS: Final = 0.7  # per workload and start
WORKLOADS: Final = (
    *("call_async", "many_async", "rref_method", "send_64k", "send_1", "send_16"),
    *("send_256", "echo_16", "at_once_16", "tcp_16", "tcp_256"),
)
PACKAGES: Final = {"pyzmq": "zmq", "grpcio": "grpc", "ray": "ray"}
# What a remote object is called differs.
TITLES: Final = {"RRef: method on a kept one": "method of a remote object"}

Figures = Mapping[str, Figure | None]  # by side


def ratio(row: Row, figures: Figures) -> float | None:
    """Return how many times as good as the best of the others asyncrpc is."""
    ours, *others = (figures[side] for side in w.ALL)
    return times_as_good(row, ours, others)


def table(results: Sequence[tuple[Row, Figures]]) -> str:
    """Return the rows: text to the left, numbers to the right."""
    lines = [["workload", "unit", *w.ALL, "ratio"]]
    for row, figures in results:
        times = ratio(row, figures)
        lines.append(
            [
                TITLES.get(row.name, row.name),
                row.unit,
                *(str(figures[side] or "-") for side in w.ALL),
                "-" if times is None else f"{times:.2f}",
            ]
        )
    return aligned(lines)


def about(starts: int, seconds: float) -> str:
    """Return what the figures are, and which versions they are of."""
    return (
        f"medians (least-most) over {starts} of each, {seconds:g} s a workload and "
        "start; ratio over 1:\nasyncrpc does better than the best of the others.  "
        f"{machine.versions(PACKAGES)}"
    )


def missing() -> list[str]:
    """Return the packages that are not installed here."""
    return [
        package
        for package, module in PACKAGES.items()
        if importlib.util.find_spec(module) is None
    ]


def main() -> None:
    parser = pages.parser(__doc__, STARTS)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    options = parser.parse_args()
    if missing():
        parser.error(f"{', '.join(missing())} are not installed: run make bench-peers")
    begun_s = time.monotonic()
    load = machine.load()
    comparison = Comparison(WORKLOADS, seconds=options.seconds, sides=w.ALL)
    comparison.run(options.starts)
    results = [
        (row, {side: comparison.figure(side, row) for side in w.ALL})
        for row in w.rows_of(WORKLOADS)
    ]
    text = f"{table(results)}\n\n{about(options.starts, options.seconds)}"
    print(f"{machine.describe()}, load {load:g} before the run\n\n{text}")
    for side, reasons in comparison.failures.items():
        for name, reason in reasons.items():
            print(f"failed: {side}, {name}: {reason}")
    if options.update_docs:
        pages.renew("peers", pages.as_block(text))
    say(f"{time.monotonic() - begun_s:.0f} s")


if __name__ == "__main__":
    main()
