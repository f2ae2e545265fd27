"""What the two sides share: how they are started, and how they report.

A side is two processes, `python -m tests.bench.sides.NAME_side --rank 0|1 ...`.  Rank 0
prints one JSON line per workload: its name and one value for each of its rows.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass

from tests.bench.harness import Budget


@dataclass(frozen=True)
class Arguments:
    """What one process of a side is told."""

    rank: int
    port: int
    seconds: float
    workloads: Sequence[str]

    def budget_for(self, name: str) -> Budget:
        """Return how long to measure; the largest tensors only a few times."""
        return Budget(self.seconds / 2, 2) if "_256" in name else Budget(self.seconds)


def parse() -> Arguments:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("workloads", nargs="+")
    return Arguments(**vars(parser.parse_args()))


def report(name: str, values: Sequence[float]) -> None:
    """Tell the parent what one workload gave."""
    print(json.dumps([name, *values]), flush=True)
