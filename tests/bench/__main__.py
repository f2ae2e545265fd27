"""How does asyncrpc compare with torch.distributed.rpc, on this machine, now?

    $ make bench                      # everything, side by side: under four minutes
    $ make bench ONLY=call,rref       # workloads whose names contain one of these
    $ make bench ONLY=transport       # one of the scripts bench_*.py instead
    $ python -m tests.bench --quick   # one start of each side

Nothing passes or fails.  Each start is a fresh pair of processes; the starts of the two
sides alternate; a cell is the median over starts with its range.  A ratio over 1 means
that asyncrpc does better.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

import torch

import asyncrpc
from tests.bench import harness
from tests.bench.workloads import WORKLOADS, rows_of

STARTS: Final = 3
SECONDS: Final = 0.8  # per workload and start
QUICK_SECONDS: Final = 0.25
START_LIMIT_S: Final = 120.0
SCRIPTS: Final = sorted(
    path.stem.removeprefix("bench_")
    for path in Path(__file__).parent.glob("bench_*.py")
)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def process(
    side: str, rank: int, options: Sequence[str]
) -> Iterator[subprocess.Popen[str]]:
    module = f"tests.bench.sides.{side}_side"
    command = [sys.executable, "-m", module, "--rank", str(rank), *options]
    started = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    with started:
        try:
            yield started
            started.wait(START_LIMIT_S)
        finally:
            started.kill()  # if it ended, this does nothing


def run_start(side: str, names: Sequence[str], seconds: float) -> dict[str, float]:
    """Run one pair of processes; return a value for each row."""
    options = ["--port", str(free_port()), "--seconds", str(seconds), *names]
    values: dict[str, float] = {}
    with process(side, 1, options), process(side, 0, options) as caller:
        assert caller.stdout is not None
        for name, figures in read_reports(caller.stdout):
            rows = WORKLOADS[name]
            values |= {row.name: one for row, one in zip(rows, figures, strict=True)}
            told = ", ".join(
                f"{harness.short(one)} {row.unit}"
                for row, one in zip(rows, figures, strict=True)
            )
            say(f"  {side:>8}  {name:<12} {told}")
    if caller.returncode:
        say(f"  {side:>8}  failed with exit status {caller.returncode}")
    return values


def read_reports(lines: IO[str]) -> Iterator[tuple[str, list[float]]]:
    for line in lines:
        if line.startswith("["):
            name, *figures = json.loads(line)
            yield name, figures


def chosen(only: str) -> tuple[list[str], list[str]]:
    """Return the workloads and the scripts that a filter names."""
    words = [word for word in only.split(",") if word]
    if not words:
        return list(WORKLOADS), []

    def pick(names: Sequence[str]) -> list[str]:
        return [name for name in names if any(word in name for word in words)]

    return pick(list(WORKLOADS)), pick(SCRIPTS)


def compare(
    names: Sequence[str], *, starts: int, seconds: float
) -> list[harness.Result]:
    """Measure both sides in turn."""
    given: Mapping[str, list[dict[str, float]]] = defaultdict(list)
    for start in range(starts):
        sides = harness.SIDES if start % 2 == 0 else harness.SIDES[::-1]
        for side in sides:
            say(f"start {start + 1} of {starts}: {side}")
            given[side].append(run_start(side, names, seconds))
    return harness.collect(rows_of(names), given)


def describe_machine() -> str:
    return (
        f"{platform.machine()}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}, torch {torch.__version__}, asyncrpc "
        f"{asyncrpc.__version__}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--quick", action="store_true", help="one short start a side")
    parser.add_argument("--only", default=os.environ.get("ONLY", ""), metavar="NAMES")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write figures there")
    parser.add_argument("--markdown", action="store_true", help="print for a document")
    options = parser.parse_args()
    names, scripts = chosen(options.only)
    if not names and not scripts:
        parser.error(
            f"nothing is called {options.only!r}; there are the workloads "
            f"{', '.join(WORKLOADS)} and the scripts {', '.join(SCRIPTS)}"
        )
    begun_s = time.monotonic()
    if names:
        results = compare(
            names,
            starts=1 if options.quick else STARTS,
            seconds=QUICK_SECONDS if options.quick else SECONDS,
        )
        print(describe_machine() + "\n")
        print(harness.table(results, markdown=options.markdown))
        print("\nmedian (least-most) over starts; ratio over 1: asyncrpc does better")
        if options.json:
            written = {"machine": describe_machine(), "rows": harness.as_json(results)}
            options.json.write_text(json.dumps(written, indent=2) + "\n")
    for script in scripts:
        say(f"bench_{script}.py")
        subprocess.run(
            [sys.executable, "-m", f"tests.bench.bench_{script}"], check=False
        )
    say(f"{time.monotonic() - begun_s:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
