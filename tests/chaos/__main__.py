"""Chaos: real processes under load, killed, stopped, parted and cut off, by a seed.

    python -m tests.chaos --minutes 10 --seed 7

Prints what was broken, what the callers were told, what the callees had logged, and a
verdict; the exit status is 0 only if it is good.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from pathlib import Path

from tests.chaos.fleet import Settings
from tests.chaos.run import go
from tests.chaos.tables import show


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=random.randrange(10_000))
    parser.add_argument("--workers", type=int, default=5)
    parser.add_argument(
        "--wires", choices=["auto", "namespaces", "proxies"], default="auto"
    )
    parser.add_argument("--keep", type=Path, help="a folder that keeps the logs")
    parser.add_argument("--verbose", action="store_true", help="name each fault")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="asyncrpc-chaos-") as folder:
        settings = Settings(
            seconds=60 * asked.minutes,
            seed=asked.seed,
            workers=asked.workers,
            wires=asked.wires,
            folder=asked.keep or Path(folder),
            is_verbose=asked.verbose,
        )
        report = asyncio.run(go(settings))
    show(report)
    again = f"make chaos MINUTES={asked.minutes:g} SEED={asked.seed}"
    print(f"{'good' if report.verdict.is_good else 'BAD'}: {again}")
    return 0 if report.verdict.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
