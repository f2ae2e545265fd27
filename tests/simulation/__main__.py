"""Runs a scenario: `python -m tests.simulation --scenario churn --seed 7`.

With `--seeds 2000` it runs every scenario with so many seeds, shared out among them.
"""

from __future__ import annotations

import argparse
import sys
import time

from tests.simulation.scenarios import SCENARIOS, Result, play


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("--scenario", choices=sorted(SCENARIOS), default="churn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int)
    given = parser.parse_args()
    begun_s = time.monotonic()
    result = play(given.scenario, given.seed, workers=given.workers)
    print(f"{time.monotonic() - begun_s:.1f} s")
    print(result.digest, dict(result.world.done), dict(result.world.ledger.errors))
    return tell(result, given.scenario, given.seed, given.workers)


def tell(result: Result, scenario: str, seed: int, workers: int | None) -> int:
    """Print what went wrong, and how to see it again; return the exit status."""
    if not result.problems:
        return 0
    for at_s, event in result.trace:
        print(f"  {at_s:12.6f} {event}")
    for problem in result.problems[:20]:
        print(f"- {problem}")
    more = f" WORKERS={workers}" if workers else ""
    print(f"make sim SCENARIO={scenario} SEED={seed}{more}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
