"""Runs tests, each in a process forked from this one, so many at a time.

This process has imported torch and the test modules once, and has started no thread: a
fork of it is a fresh interpreter with everything imported.  So an implementation must
start no thread, and open no socket, when it is imported.

Invariant: when a test has ended, or the run is interrupted, no process of it is left.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from tests.conformance import child
from tests.conformance.results import Result, Status

POLL_S: Final = 0.02
GRACE_S: Final = 25.0  # beyond the limit of a test, which is its own to keep


@dataclass(frozen=True, slots=True)
class Options:
    jobs: int = 2  # tests at a time
    timeout_s: float = 90.0  # what one may take
    logs: Path | None = None  # where the output of each is kept, if anywhere


@dataclass(frozen=True, slots=True)
class Running:
    name: str
    folder: Path
    begun_s: float


def run(
    names: Iterable[str], options: Options, poll: Callable[[], None] = lambda: None
) -> Generator[tuple[str, Result]]:
    """Run tests; yield each with its result, as they end."""
    to_do, running = list(names), dict[int, Running]()
    with tempfile.TemporaryDirectory(prefix="conformance_") as folder:
        try:
            while to_do or running:
                while to_do and len(running) < options.jobs:
                    pid, started = _start(to_do.pop(0), Path(folder))
                    running[pid] = started
                time.sleep(POLL_S)
                poll()
                for pid, test in list(running.items()):
                    if (result := _ended(pid, test, options)) is not None:
                        del running[pid]
                        yield test.name, result
        finally:
            for pid in running:
                _end(pid)
                os.waitpid(pid, 0)


def again(result: Result) -> bool:
    """Whether a second run of a test may end otherwise than its first."""
    return not result.is_good and not result.missing


def rerun(earlier: Result, result: Result) -> Result:
    """Return what a second run says, and that it took one."""
    return replace(result, flaky=result.is_good and not earlier.is_good)


def threads() -> int:
    """Count the threads of this process; where that cannot be seen, say one."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.exists() else 1


def _start(name: str, folder: Path) -> tuple[int, Running]:
    own = Path(tempfile.mkdtemp(dir=folder))
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        try:
            child.run(name, own)
        finally:
            os._exit(0)
    return pid, Running(name, own, time.monotonic())


def _ended(pid: int, test: Running, options: Options) -> Result | None:
    """Return a test's result if it has ended, or has to be ended now."""
    has_ended, _ = os.waitpid(pid, os.WNOHANG)
    took_s = time.monotonic() - test.begun_s
    is_late = took_s > options.timeout_s + GRACE_S
    if not has_ended and not is_late:
        return None
    _end(pid)
    if not has_ended:
        os.waitpid(pid, 0)
    try:
        result = Result.from_json(json.loads((test.folder / child.RESULT).read_text()))
    except (OSError, ValueError):
        status = Status.TIMEOUT if is_late else Status.FAIL
        message = "killed: it was late" if is_late else "the test's process died"
        result = Result(status, message, round(took_s, 2))
    if options.logs is not None:
        _keep(test, options.logs)
    shutil.rmtree(test.folder, ignore_errors=True)
    return result


def _end(pid: int) -> None:
    """End what is left of a test: its ranks are in the session that it began."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _keep(test: Running, logs: Path) -> None:
    logs.mkdir(parents=True, exist_ok=True)
    number = len(list(logs.glob(f"{test.name}.*.log")))
    with suppress(OSError):
        shutil.copy(test.folder / child.LOG, logs / f"{test.name}.{number}.log")
