"""Starting the processes that a benchmark measures, and hearing what they found.

A process is `python -m MODULE --rank RANK --port PORT ...`.  Rank 0 prints one JSON
array per line, of a name and what was found; whatever else it prints is ignored.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from tests.ports import free_port

LIMIT_S: Final = 120.0
ENDING_S: Final = 10.0  # for those that do not report, once rank 0 has ended


def say(text: str) -> None:
    """Tell the person who waits; standard output is for results."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def process(
    module: str, arguments: Sequence[str], environ: Mapping[str, str]
) -> Iterator[subprocess.Popen[str]]:
    """Run a module in a process with one torch thread; kill it at the end."""
    started = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", **environ},
    )
    with started:
        try:
            yield started
        finally:
            started.kill()  # if it ended, this does nothing


def reports(
    module: str,
    arguments: Sequence[str],
    *,
    world_size: int = 2,
    limit_s: float = LIMIT_S,
    environ: Mapping[str, str] | None = None,
) -> Iterator[tuple[str, list[Any]]]:
    """Run the processes of one start; yield what rank 0 reports, as it comes."""
    port = str(free_port())
    with ExitStack() as stack:
        started = [
            stack.enter_context(
                process(
                    module,
                    ["--rank", str(rank), "--port", port, *arguments],
                    environ or {},
                )
            )
            for rank in reversed(range(world_size))
        ]
        reporter = started[-1]
        watchdog = threading.Timer(limit_s, reporter.kill)
        watchdog.start()
        try:
            assert reporter.stdout is not None
            for line in reporter.stdout:
                if line.startswith("["):
                    name, *values = json.loads(line)
                    yield name, values
            status = reporter.wait()
        finally:
            watchdog.cancel()
        _let_end(started)
        if status:
            raise RuntimeError(f"rank 0 of {module} ended with status {status}")


def _let_end(started: Sequence[subprocess.Popen[str]]) -> None:
    """Give the others a moment to end by themselves."""
    end_s = time.monotonic() + ENDING_S
    for worker in started:
        try:
            worker.wait(max(0.0, end_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            return


def report(name: str, *values: object) -> None:
    """Tell the parent what was found; for rank 0."""
    print(json.dumps([name, *values]), flush=True)


def choose_core(rank: int, cores: str) -> None:
    """Keep this process on one core, if that is wanted and there are enough."""
    mine = sorted(os.sched_getaffinity(0))
    if cores == "same":
        os.sched_setaffinity(0, mine[:1])
    elif cores == "apart" and len(mine) > 1:
        os.sched_setaffinity(0, mine[rank : rank + 1])
