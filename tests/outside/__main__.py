"""What other libraries do with RPC, on torch and on the facade: `make test-outside`.

Each program uses a library's public interface, in several processes, and shows results.
It runs by `python program.py`, then by `python -m asyncrpc.compat program.py`: the
results must be equal.  Only torchpippy installs tests of its RPC; they are run.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parent / "programs"
REPOSITORY: Final = Path(__file__).parents[2]
LIMIT_S: Final = 600.0  # only a hang reaches it
RESULT: Final = "result: "  # begins a line of the program; libraries print others


@dataclass(frozen=True, slots=True)
class Program:
    """One program, the distribution that it is about, and what it does with RPC."""

    file: str
    package: str
    does: str


PROGRAMS: Final = (
    Program("torchrl_replay.py", "torchrl", "remote replay buffer"),
    Program("torchrl_collector.py", "torchrl", "RPC collector"),
    Program("pyg_features.py", "torch_geometric", "distributed feature store"),
    Program("fairscale_pipeline.py", "fairscale", "distributed pipeline"),
    Program("torchopt_maml.py", "torchopt", "distributed MAML"),
    Program("pippy_tests.py", "torchpippy", "its own tests"),
    Program("containers.py", "tensordict", "values, with transformers'"),
    Program("torch_examples.py", "torch", "programs as in its examples"),
)
CANNOT_RUN: Final = {
    "graphlearn-torch 0.2.4": "its wheel is linked with CUDA",
    "machin 0.4.2": "wants torch.distributed.broadcast_multigpu, now removed",
    "colossalai 0.5.0": "wants torch 2.5.1 or older",
}


@dataclass(frozen=True, slots=True)
class Run:
    results: list[str]
    seconds: float
    cpu_seconds: float  # of all its processes; other load hardly changes it
    failure: str


def run(*command: str) -> Run:
    """Run a program with the interpreter of this environment."""
    path = os.pathsep.join((str(REPOSITORY), str(HERE)))
    quiet = {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    begun, before_s = time.monotonic(), cpu_s()
    try:
        ended = subprocess.run(
            [sys.executable, *command],
            env={**os.environ, **quiet, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Run([], LIMIT_S, cpu_s() - before_s, f"did not end in {LIMIT_S:g} s")
    lines = ended.stdout.splitlines()
    results = sorted(line for line in lines if line.startswith(RESULT))
    failure = ended.stderr if ended.returncode else ""
    return Run(results, time.monotonic() - begun, cpu_s() - before_s, failure)


def cpu_s() -> float:
    """Return the CPU time of all processes that have ended here, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def verdict(theirs: Run, ours: Run) -> str:
    """Compare two runs."""
    if theirs.failure or not theirs.results:
        return "fails on torch"
    if ours.failure:
        return "fails on asyncrpc"
    return "equal" if ours.results == theirs.results else "differs"


def main() -> int:
    """Run all programs, print a table, and return how many are not equal."""
    heads = ("library", "does", "torch", "CPU", "asyncrpc", "CPU", "outcome")
    rows: list[tuple[str, ...]] = [heads]
    wrong = 0
    for program in PROGRAMS:
        name = f"{program.package} {version(program.package)}"
        print(f"{name}: {program.does} ...", file=sys.stderr, flush=True)
        file = str(HERE / program.file)
        theirs, ours = run(file), run("-m", "asyncrpc.compat", file)
        outcome = verdict(theirs, ours)
        wrong += outcome != "equal"
        seconds = [
            f"{s:.1f} s"
            for side in (theirs, ours)
            for s in (side.seconds, side.cpu_seconds)
        ]
        rows.append((name, program.does, *seconds, outcome))
        if outcome != "equal":
            print(theirs.failure, ours.failure, sep="\n", file=sys.stderr)
            print(*theirs.results, "beside", *ours.results, sep="\n", file=sys.stderr)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(row, widths, "<<>>>><", strict=True)
        print("  ".join(f"{cell:{side}{width}}" for cell, width, side in cells))
    print()
    for package, reason in CANNOT_RUN.items():
        print(f"{package} cannot run: {reason}")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
