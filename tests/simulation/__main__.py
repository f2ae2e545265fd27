"""Simulations: real workers on virtual time, and what chance a seed decides.

    python -m tests.simulation --scenario churn --seed 7     one run
    python -m tests.simulation --scenario losses --seed 7    one of groups
    python -m tests.simulation --seeds 2000                  every scenario, many seeds
    python -m tests.simulation --sizes 125 250 500 1000      what a worker costs
    python -m tests.simulation --scale 64 512 4096           what a large group costs

The exit status is 0 if all that must hold has held.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import track

from tests.simulation import scaling, scenarios, sizes
from tests.simulation.group_scenarios import PLANS, play_groups
from tests.simulation.scenarios import SCENARIOS, SMALL, Result

PROBLEMS_MAX = 20  # shown of one run
FAILURES_MAX = 10  # shown of many


def main() -> int:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("--scenario", choices=sorted([*SCENARIOS, *PLANS]))
    parser.add_argument("--seed", type=int, default=0, help="of one run, or the first")
    parser.add_argument("--workers", type=int, help="in place of the scenario's own")
    parser.add_argument("--seeds", type=int, help="run so many seeds")
    parser.add_argument("--sizes", type=int, nargs="+", help="measure so many workers")
    parser.add_argument("--scale", type=int, nargs="+", help="measure so large groups")
    parser.add_argument("--json", type=Path, help="write what --scale measured there")
    parser.add_argument(
        "--from",
        dest="source",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="measure nothing: show what --json wrote",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="with --from")
    options = parser.parse_args()
    if options.source:
        measured = [cost for path in options.source for cost in scaling.load(path)]
        print(scaling.markdown(measured))
        if options.plot is not None:
            scaling.draw(measured, options.plot)
        return 0
    if options.scale:
        return scaling.compare(options.scale, options.seed, options.json)
    if options.sizes:
        return sizes.compare(options.sizes, options.seed)
    if options.seeds:
        names = [options.scenario] if options.scenario else [*SMALL, *PLANS]
        return run_many(names, range(options.seed, options.seed + options.seeds))
    return run_one(options.scenario or "churn", options.seed, options.workers)


def play(scenario: str, seed: int, workers: int | None = None) -> Result:
    """Run a scenario, of calls or of groups."""
    run = play_groups if scenario in PLANS else scenarios.play
    return run(scenario, seed, workers=workers)


def run_one(scenario: str, seed: int, workers: int | None) -> int:
    """Run one scenario with one seed; return the exit status."""
    begun_s = time.monotonic()
    result = play(scenario, seed, workers)
    world = result.world
    print(
        f"{scenario}, seed {seed}: {len(world.ledger.calls):,} calls of "
        f"{len(world.neighbours):,} workers, {world.network.loop.time():.0f} s of "
        f"virtual time in {time.monotonic() - begun_s:.1f} s"
    )
    print(f"done: {dict(world.done)}")
    print(f"errors: {dict(world.ledger.errors)}")
    print(f"digest: {result.digest}")
    tell(result, scenario, seed, workers)
    return 1 if result.problems else 0


def run_many(names: list[str], seeds: range) -> int:
    """Run so many seeds, shared out among the scenarios; return the exit status."""
    failures: list[str] = []
    calls = 0
    console = Console(stderr=True, highlight=False)
    for seed in track(seeds, description="seeds", console=console):
        scenario = names[seed % len(names)]
        result = play(scenario, seed)
        calls += len(result.world.ledger.calls)
        if result.problems:
            failures.append(command(scenario, seed, None))
            if len(failures) <= FAILURES_MAX:
                tell(result, scenario, seed, None)
    print(f"{len(seeds):,} seeds, {calls:,} calls, {len(failures)} failures")
    for line in failures:
        print(line)
    return 1 if failures else 0


def tell(result: Result, scenario: str, seed: int, workers: int | None) -> None:
    """Print what went wrong, if anything, and how to see it again."""
    if not result.problems:
        return
    for at_s, event in result.trace:
        print(f"  {at_s:12.6f} {event}")
    for problem in result.problems[:PROBLEMS_MAX]:
        print(f"- {problem}")
    print(command(scenario, seed, workers))


def command(scenario: str, seed: int, workers: int | None) -> str:
    """Return how to run it again."""
    more = f" WORKERS={workers}" if workers else ""
    return f"make sim SCENARIO={scenario} SEED={seed}{more}"


if __name__ == "__main__":
    sys.exit(main())
