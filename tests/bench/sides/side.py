"""What the two sides share: how they are started, and how they report.

A side is some processes, `python -m tests.bench.sides.NAME_side --rank RANK ...`.  Rank
0 reports one line per workload: its name, one value for each of its rows (none if it
failed), and why it failed.  A line without a name says why the start failed.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.bench import workloads as w
from tests.bench.harness import Budget
from tests.bench.processes import report


@dataclass(frozen=True)
class Arguments:
    """What one process of a side is told."""

    rank: int
    port: int
    seconds: float
    kind: str
    spin: str  # asyncrpc's NetworkOptions.spin; empty: its default
    workloads: Sequence[str]

    @property
    def processes(self) -> int:
        return w.KINDS[self.kind].processes

    @property
    def name(self) -> str:
        return name_of(self.rank)

    def budget_for(self, name: str) -> Budget:
        """Return how long to measure; the largest tensors only a few times."""
        return Budget(self.seconds / 2, 4) if "_256" in name else Budget(self.seconds)


def name_of(rank: int) -> str:
    return (w.CALLER, w.CALLEE)[rank] if rank < 2 else f"{w.CALLER}{rank}"


def warm_ups_for(nbytes: int) -> int:
    """Return how often a tensor travels before it is measured: pools must fill."""
    return 3 if nbytes > 100 << 20 else 10


def reason_of(error: BaseException) -> str:
    """Return the first line of what went wrong."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no text'}"


def parser_of_process() -> argparse.ArgumentParser:
    """Return a parser of what each process of a start is told."""
    parser = argparse.ArgumentParser()
    for name in ("--rank", "--port"):
        parser.add_argument(name, type=int, required=True)
    return parser


def parse() -> Arguments:
    parser = parser_of_process()
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--kind", choices=list(w.KINDS), default="pair")
    parser.add_argument("--spin", default="")
    parser.add_argument("workloads", nargs="+")
    return Arguments(**vars(parser.parse_args()))


def start(main: Callable[[Arguments], None]) -> int:
    """Run this process; if it cannot begin, say so for each of its workloads."""
    arguments = parse()
    try:
        main(arguments)
    except Exception as error:  # noqa: BLE001  (it is reported)
        traceback.print_exc(file=sys.stderr)
        if arguments.rank == 0:
            report("", [], f"the start failed: {reason_of(error)}")
        return 1
    return 0
