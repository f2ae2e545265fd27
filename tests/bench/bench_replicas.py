"""What does each way of choosing a replica do to the tail of latencies, and the load?

    $ make bench ONLY=replicas
    $ python -m tests.bench.bench_replicas --calls 200000 --update-docs

Virtual time, from seeds: the figures do not depend on the machine.  What is simulated
is in tests/simulation/replica_queues.py; what chooses is the machine of `Replicas`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from tests.bench.pages import replaced
from tests.simulation.replica_queues import POLICIES, SCENARIOS, Outcome, play

CALLS: Final = 200_000
PAGE: Final = Path(__file__).parents[2] / "docs" / "explanation" / "replicas.md"
_HEADS: Final = ("p50, ms", "p99, ms", "p99.9, ms", "more calls", "work, s")


def cells(outcome: Outcome) -> list[str]:
    """Return the figures of one policy."""
    quantiles = (outcome.quantile_s(share) for share in (0.5, 0.99, 0.999))
    return [
        *(f"{1e3 * quantile:,.1f}" for quantile in quantiles),
        f"{outcome.extra_calls:.1%}",
        f"{outcome.worked_s:,.0f}",
    ]


def table(calls: int, seed: int) -> str:
    """Return a table in Markdown for each scenario."""
    lines = [f"{calls:,} calls for each line, seed {seed}."]
    for scenario, traffic in SCENARIOS.items():
        head = f"{scenario[0].upper()}{scenario[1:]}"
        lines += [
            "",
            f"| {head} | {' | '.join(_HEADS)} |",
            "| --- " + 5 * "| ---: " + "|",
        ]
        for policy in POLICIES:
            outcome = play(policy, traffic, calls=calls, seed=seed)
            lines.append(f"| {policy.name} | {' | '.join(cells(outcome))} |")
    return "\n".join(lines)


def main() -> None:
    """Print the tables, or write them into the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--calls", type=int, default=CALLS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--update-docs", action="store_true")
    options = parser.parse_args()
    tables = table(options.calls, options.seed)
    print(tables)
    if options.update_docs:
        text = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(replaced(text, "replicas", tables), encoding="utf-8")


if __name__ == "__main__":
    main()
