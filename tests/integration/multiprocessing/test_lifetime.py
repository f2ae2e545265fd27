"""No process outlives its parent, however that ends; real ones, real signals."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.multiprocessing.pidfds import have_ended, opened

REPOSITORY = Path(__file__).parents[3]
NPROCS = 2
# The promise is two seconds.  The rest is for a machine that does other things, too.
LIMIT_S = 60.0  # that only a failure reaches

GUARDED = """
import sys
from asyncrpc.multiprocessing import launch
from tests.integration.multiprocessing import targets

if __name__ == "__main__":
    launch(getattr(targets, sys.argv[1]), nprocs=2, method=sys.argv[2])
"""
UNGUARDED = """
from asyncrpc.multiprocessing import launch
from tests.integration.multiprocessing import targets

launch(targets.square, (2,))
"""

pytestmark = pytest.mark.skipif(
    not hasattr(os, "pidfd_open"), reason="watches processes by pidfd, which is Linux's"
)


@contextlib.contextmanager
def running(script: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run a script in a session of its own, as a shell would in a terminal."""
    with subprocess.Popen(
        [sys.executable, str(script), *arguments],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def read_pids(process: subprocess.Popen[str]) -> list[int]:
    assert process.stdout is not None
    assert process.stderr is not None
    lines = [process.stdout.readline() for _ in range(NPROCS)]
    assert all(lines), process.stderr.read()
    return [int(line) for line in lines]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(GUARDED)
    return path


@pytest.mark.parametrize("target", ["tell_pid_and_wait", "tell_pid_and_hold_the_gil"])
def test_ctrl_c_ends_all(script: Path, target: str) -> None:
    with (
        running(script, target, "spawn") as process,
        opened(read_pids(process)) as children,
    ):
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _, errors = process.communicate(timeout=LIMIT_S)
        assert have_ended(children, within_s=0.0)
    assert process.returncode == -signal.SIGINT
    assert errors.count("Traceback") == 1, errors  # the parent's, none of the children


@pytest.mark.parametrize(
    ("target", "method"),
    [
        ("tell_pid_and_wait", "spawn"),
        ("tell_pid_and_hold_the_gil", "spawn"),
        ("tell_pid_and_wait", "forkserver"),
    ],
)
def test_the_children_of_a_killed_parent_die(
    script: Path, target: str, method: str
) -> None:
    with (
        running(script, target, method) as process,
        opened(read_pids(process)) as children,
    ):
        process.kill()
        assert have_ended(children, within_s=LIMIT_S)


@pytest.mark.slow
def test_an_unguarded_main_module_is_explained(tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(UNGUARDED)
    with running(script) as process:
        _, errors = process.communicate(timeout=300.0)
    assert process.returncode == 1
    assert "put the call under `if __name__ == '__main__':`" in errors
    assert "ProcessFailedError: rank 0 of 1 exited with code 1 while it started" in (
        errors
    )
