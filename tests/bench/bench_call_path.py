"""Where does the time of a small call go, in microseconds?

Two processes, a Unix socket, calls one after the other.  In a traced start the places
that a call passes (`tracing.Place`) take down the time, on one clock for both
processes; a stage is the time from one place to the next, less what one mark costs,
which is measured too.  Starts that trace nothing alternate with them: if the sum of the
medians is near the p50 of those, nothing is missing and nothing is counted twice.

A write returns while the other side already wakes, or, where both share a core, after
it: here the write ends when it returns or when the other side has read, whichever is
first.  Left alone, the scheduler puts the two processes now on one core and now on two,
from start to start: so each is kept on a core of its own, unless `--cores` says else.

    $ make bench ONLY=call_path
    $ python -m tests.bench.bench_call_path --starts 5 --calls 5000 --cores free
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Final

from tests.bench import pages, tracing
from tests.bench.harness import p50_p99_us
from tests.bench.processes import reports, say
from tests.bench.tracing import Place

MODULE: Final = "tests.bench.sides.call_path_side"

Stages = Mapping[Place, Sequence[float]]


class Workload:
    """What all starts found of one kind of call."""

    def __init__(self) -> None:
        self.starts: list[Stages] = []
        self.traced_us: list[float] = []  # the p50 of each traced start
        self.plain_us: list[list[float]] = []  # p50 and p99 of each other start

    def add_traced(self, marks: Sequence[int], mark_cost_us: float) -> None:
        calls = tracing.passages(marks)
        stages = tracing.stages(calls)
        total = [(call[Place.END] - call[Place.BEGIN]) / 1e3 for call in calls]
        self.traced_us.append(statistics.median(total))
        self.starts.append(
            {
                place: [time - mark_cost_us for time in times]
                for place, times in stages.items()
            }
        )

    def stage(self, place: Place) -> list[float] | None:
        return tracing.stage_of(self.starts, place)


def run_starts(starts: int, arguments: Sequence[str]) -> dict[str, Workload]:
    """Alternate traced and untraced starts."""
    workloads: dict[str, Workload] = {}
    for start in range(2 * starts):
        traced = bool(start % 2)
        cost_us = 0.0
        say(f"start {start + 1} of {2 * starts}: {'traced' if traced else 'plain'}")
        flags = ["--traced"] if traced else []
        for name, (first, *rest) in reports(MODULE, [*arguments, *flags]):
            if name == "mark":
                cost_us = first / 1000
                if traced:
                    say(f"  a mark costs {cost_us:.2f} us; absent: {rest[0]}")
                continue
            workload = workloads.setdefault(name, Workload())
            if traced:
                workload.add_traced(first, cost_us)
            else:
                workload.plain_us.append(
                    p50_p99_us([took_us / 1e6 for took_us in first])
                )
    return workloads


def cells(pair: Sequence[float] | None) -> str:
    return f"{'-':>10}{'-':>8}" if pair is None else f"{pair[0]:>10.1f}{pair[1]:>8.1f}"


def table(workloads: Mapping[str, Workload]) -> str:
    """Return the stages of each workload side by side, and their sums."""
    head = f"{'stage, us':<36}"
    lines = [
        " " * 36 + "".join(f"{name:>18}" for name in workloads),
        head + f"{'p50':>10}{'p99':>8}" * len(workloads),
    ]
    for place in list(Place)[1:]:
        line = "".join(cells(workload.stage(place)) for workload in workloads.values())
        lines.append(f"{place.text:<36}{line}")
    totals = {
        "sum of the medians": [
            sum(
                pair[0]
                for place in Place
                if (pair := workload.stage(place)) is not None
            )
            for workload in workloads.values()
        ],
        "whole call, traced": [
            statistics.median(workload.traced_us) for workload in workloads.values()
        ],
    }
    lines += [
        f"{name:<36}" + "".join(f"{value:>10.1f}{'':>8}" for value in values)
        for name, values in totals.items()
    ]
    plain = "".join(
        cells(tracing.middle(workload.plain_us)) for workload in workloads.values()
    )
    lines.append(f"{'whole call, not traced':<36}{plain}")
    return "\n".join(line.rstrip() for line in lines)


def main() -> None:
    parser = pages.parser(__doc__, 3)
    parser.add_argument("--calls", type=int, default=3000, help="per start and kind")
    parser.add_argument("--cores", choices=("apart", "same", "free"), default="apart")
    parser.add_argument(
        "--spin", default="", help="NetworkOptions.spin; empty: the default"
    )
    options = parser.parse_args()
    arguments = ["--calls", str(options.calls), "--cores", options.cores]
    text = table(run_starts(options.starts, [*arguments, "--spin", options.spin]))
    print(text)
    if options.update_docs:
        name = "call path, not polling" if options.spin == "off" else "call path"
        pages.renew(name, pages.as_block(text))


if __name__ == "__main__":
    main()
