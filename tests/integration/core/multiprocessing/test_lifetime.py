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

from tests.integration.core.multiprocessing.pidfds import have_ended, opened

REPOSITORY = Path(__file__).parents[4]
NPROCS = 2
# The promise is two seconds.  The rest is for a machine that does other things, too.
LIMIT_S = 60.0  # that only a failure reaches

GUARDED = """
import sys
from asyncrpc.multiprocessing import launch
from tests.integration.core.multiprocessing import targets

if __name__ == "__main__":
    launch(getattr(targets, sys.argv[1]), nprocs=2, method=sys.argv[2])
"""
UNGUARDED = """
from asyncrpc.multiprocessing import launch
from tests.integration.core.multiprocessing import targets

launch(targets.square, (2,))
"""

FOREIGN = """
import sys
import billiard, joblib
from tests.integration.core.multiprocessing import targets

if __name__ == "__main__":
    task = targets.launches_squares
    if sys.argv[1] == "billiard":
        with billiard.Pool(1) as pool:
            print(pool.apply(task, (sys.argv[2],)))
    else:
        print(*joblib.Parallel(n_jobs=2)([joblib.delayed(task)(sys.argv[2])]))
"""

FAILING = """
import asyncio, sys
import asyncrpc
from asyncrpc.multiprocessing import launch
from tests.integration.core.multiprocessing import targets

async def main():
    function, is_daemon = getattr(targets, sys.argv[1]), sys.argv[2] == "daemon"
    kept = [launch(function, join=False, daemon=is_daemon) for _ in range(2)]
    await asyncio.to_thread(sys.stdin.readline)
    raise RuntimeError("the program's own")

if __name__ == "__main__":
    asyncrpc.run(main())
"""
DAEMONIC = """
import multiprocessing, sys
from asyncrpc.multiprocessing import launch
from tests.integration.core.multiprocessing import targets

def start(queue):
    queue.put(launch(targets.square, (2,), 2))
    queue.put(multiprocessing.current_process().daemon)

def start_in_pool(power):
    return launch(targets.square, (power,), 2)

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    queue = context.Queue()
    process = context.Process(target=start, args=(queue,), daemon=True)
    process.start()
    print(queue.get(), queue.get())
    process.join()
    with context.Pool(1) as pool:
        print(pool.map(start_in_pool, [3]))
"""
ORPHANING = """
import multiprocessing, sys
from asyncrpc.multiprocessing import launch
from tests.integration.core.multiprocessing import targets

def start():
    launch(targets.tell_pid_and_wait, nprocs=2)

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=start, daemon=True)
    process.start()
    sys.stdin.readline()  # then the daemonic process is ended without a warning
"""
IMPORTING = """
import os, sys, threading
from asyncrpc.multiprocessing import launch
from tests.integration.core.multiprocessing import targets

if __name__ != "__main__":
    os.write(1, b"%d\\n" % os.getpid())  # a new process, which imports this
    threading.Event().wait()
else:
    launch(targets.wait_forever, nprocs=2)
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
        stdin=subprocess.PIPE,
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
def test_ctrl_c_ends_all_processes(script: Path, target: str) -> None:
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
def test_children_of_killed_parent_die(script: Path, target: str, method: str) -> None:
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
    assert "ProcessFailedError: rank 0 of 1 exited with code 1 while it sta" in errors


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize("kind", ["daemon", "other"])
@pytest.mark.parametrize("function", ["tell_pid_and_wait", "tell_pid_and_serve"])
def test_an_exception_that_ends_the_program_ends_its_processes(
    tmp_path: Path, kind: str, function: str
) -> None:
    with (
        running(written(tmp_path / "script.py", FAILING), function, kind) as process,
        opened(read_pids(process)) as watched,
    ):
        _, errors = process.communicate("go on\n", timeout=LIMIT_S)
        assert have_ended(watched, LIMIT_S)
    assert process.returncode == 1
    assert errors.count("Traceback (most recent call last)") == 1
    assert errors.rstrip().endswith("RuntimeError: the program's own")


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_daemonic_process_may_launch(tmp_path: Path, method: str) -> None:
    with running(written(tmp_path / "script.py", DAEMONIC), method) as process:
        # Seven interpreters start, most of them one after the other.
        output, errors = process.communicate(timeout=5 * LIMIT_S)
    assert output.splitlines() == ["[0, 1] True", "[[0, 1]]"], errors
    assert "Error" not in errors


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("pool", ["billiard", "loky"])
def test_foreign_pools_process_may_launch(
    tmp_path: Path, pool: str, method: str
) -> None:
    with running(written(tmp_path / "script.py", FOREIGN), pool, method) as process:
        output, errors = process.communicate(timeout=5 * LIMIT_S)
    assert output == "[0, 1]\n", errors
    assert "Error" not in errors


def test_processes_die_with_a_daemonic_parent(tmp_path: Path) -> None:
    script = written(tmp_path / "script.py", ORPHANING)
    with running(script) as process, opened(read_pids(process)) as watched:
        process.communicate("end\n", timeout=LIMIT_S)
        assert have_ended(watched, LIMIT_S)


def test_ctrl_c_while_processes_import_prints_one_traceback(tmp_path: Path) -> None:
    script = written(tmp_path / "script.py", IMPORTING)
    with running(script) as process, opened(read_pids(process)) as watched:
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=LIMIT_S)
        assert have_ended(watched, LIMIT_S)
    assert errors.count("Traceback (most recent call last)") == 1
    assert errors.rstrip().endswith("KeyboardInterrupt")


PROGRAM = """
from asyncrpc.multiprocessing import launch
def work(rank):
    return rank
if __name__ == "__main__":
    launch(work)
"""


@pytest.mark.parametrize("arguments", [["-c", PROGRAM], ["-"], ["-i", "-q"]])
def test_function_of_a_program_without_a_file_is_refused(arguments: list[str]) -> None:
    result = subprocess.run(
        [sys.executable, *arguments],
        input=PROGRAM.replace("return rank\n", "return rank\n\n") + "\n",
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert (
        "UsageError: fn must be in a file that new processes can imp" in result.stderr
    )
    assert "work.work" in result.stderr
