"""The verbs find the group of `asyncrpc run` without an address: real processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from asyncrpc.tools.cli.main import main

REPOSITORY = Path(__file__).parents[4]
LIMIT_S: Final = 120.0  # that only a failure reaches
WORK = """
import asyncio, asyncrpc
async def main():
    async with asyncrpc.Worker() as worker:
        await worker.barrier()
        print("up", flush=True)
        await asyncio.Event().wait()
asyncrpc.run(main())
"""


LAUNCHES: Final = """
import asyncio, os, asyncrpc
from asyncrpc.multiprocessing import launch
async def work(rank):
    async with asyncrpc.Worker() as worker:
        await worker.barrier()
        os.write(1, b"up\\n")  # in one piece: two processes share the pipe
        await asyncio.Event().wait()
if __name__ == "__main__":
    launch(work, nprocs=2)
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the runs of a test are, and nothing else that would name a group."""
    folder = tmp_path / "runs"
    monkeypatch.setenv("ASYNCRPC_RUN_DIR", str(folder))
    for name in ("ASYNCRPC_ADDRESS", "ASYNCRPC_SECRET", "ASYNCRPC_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)
    return folder


@contextlib.contextmanager
def run_of(
    folder: Path, name: str, nprocs: int, *, source: str = WORK, **environment: str
) -> Iterator[subprocess.Popen[str]]:
    """Start a run, of the command or of `launch`; go on when its workers listen."""
    script = folder / f"{name}.py"
    script.write_text(source)
    command = [sys.executable]
    if source is not LAUNCHES:
        command += ["-m", "asyncrpc", "run", f"--nproc={nprocs}"]
    with subprocess.Popen(
        [*command, str(script)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            for _ in range(nprocs):
                assert process.stdout.readline().endswith("up\n")
            yield process
        finally:
            process.terminate()
            process.wait(LIMIT_S)


class VerbRunner:
    """Runs a command here, and returns its status and what it prints."""

    def __init__(self, printed: pytest.CaptureFixture[str]) -> None:
        self._printed = printed

    def __call__(self, *arguments: str) -> tuple[int, str]:
        self._printed.readouterr()
        status = main(arguments)
        output = self._printed.readouterr()
        return status, output.out + output.err


@pytest.fixture
def run_verb(capsys: pytest.CaptureFixture[str]) -> VerbRunner:
    return VerbRunner(capsys)


def test_launched_processes_are_found(
    tmp_path: Path, place: Path, run_verb: VerbRunner
) -> None:
    with run_of(tmp_path, "train", 2, source=LAUNCHES) as program:
        (entry,) = place.iterdir()
        assert entry.name == f"train-{program.pid}"
        status, text = run_verb("status")
        assert status == 0
        assert " worker0 " in text
        assert " worker1 " in text
        program.send_signal(signal.SIGINT)
        program.wait(LIMIT_S)
        assert not [*place.iterdir()]


def test_single_run_is_found_by_all_verbs(
    tmp_path: Path, place: Path, run_verb: VerbRunner
) -> None:
    assert run_verb("runs")[0] == 1
    with run_of(tmp_path, "train", 2) as launcher:
        name = f"train-{launcher.pid}"
        status, printed = run_verb("status")
        assert status == 0
        assert [line.split()[1] for line in printed.splitlines()] == [
            *("name", "worker0", "worker1")
        ]
        for verb in (("why",), ("top", "--once"), ("calls",), ("refs",), ("stacks",)):
            status, printed = run_verb(*verb)
            assert status == 0, printed
        status, printed = run_verb("doctor")
        assert f"2 workers of {name} report of themselves" in printed
        status, printed = run_verb("doctor", "--here")
        assert "report of themselves" not in printed
        status, printed = run_verb("runs", "--json")
        (run,) = json.loads(printed)["runs"]
        assert (status, run["run"], run["nprocs"]) == (0, name, 2)
        assert [worker["name"] for worker in run["workers"]] == ["worker0", "worker1"]
    assert list(place.iterdir()) == []


TWO_GROUPS = """
import asyncio, asyncrpc
async def main():
    async with asyncrpc.Worker("one", rank=0, world_size=1) as one:
        meeting = asyncrpc.LocalRendezvous(1)
        async with asyncrpc.Worker("two", rank=0, world_size=1, rendezvous=meeting):
            print("up", flush=True)
            await asyncio.Event().wait()
asyncrpc.run(main())
"""


def test_run_of_two_groups_shows_the_first_and_names_the_second(
    tmp_path: Path, run_verb: VerbRunner
) -> None:
    end_s = time.monotonic() + 120.0  # that only a failure reaches
    with run_of(tmp_path, "train", 1, source=TWO_GROUPS):
        while True:  # until both have told the directory of the run
            status, printed = run_verb("status")
            if "not in this group" in printed:
                break
            assert time.monotonic() < end_s, printed
        assert status == 0
        (shown,) = {"one", "two"} & set(printed.split("\n")[1].split())
        other = "two" if shown == "one" else "one"
        assert f"but not in this group: {other}; to look at them: --run " in printed
        status, printed = run_verb("status", *printed.split()[-3:])
        assert other in printed.split("\n")[1].split()
        assert "not in this group" not in printed


@pytest.mark.slow
def test_run_option_chooses_a_run_and_killed_runs_vanish(
    tmp_path: Path, place: Path, run_verb: VerbRunner
) -> None:
    with (
        run_of(tmp_path, "train", 1) as train,
        run_of(tmp_path, "evaluate", 1) as evaluate,
    ):
        status, printed = run_verb("status")
        assert status == 2
        assert "2 runs of yours are under way; choose one by --run:\nrun " in printed
        assert max(map(len, printed.splitlines())) <= 80
        for wanted in ("train", str(train.pid), f"train-{train.pid}"):
            status, printed = run_verb("status", "--run", wanted, "--json")
            assert status == 0
            assert len(json.loads(printed)["workers"]) == 1
        # It cannot remove anything, and the kernel ends its processes with it.
        train.send_signal(signal.SIGKILL)
        train.wait(LIMIT_S)
        assert len(list(place.iterdir())) == 2
        assert run_verb("status")[0] == 0
        assert [run.name for run in place.iterdir()] == [f"evaluate-{evaluate.pid}"]
        status, printed = run_verb("status", "--run", str(train.pid))
        assert status == 2
        assert f"--run '{train.pid}' names no run" in printed


@pytest.mark.slow
def test_the_workers_secret_may_be_in_a_file(
    tmp_path: Path, run_verb: VerbRunner
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a secret in a file\n")
    secret.chmod(0o600)
    with run_of(tmp_path, "train", 1, ASYNCRPC_SECRET_FILE=str(secret)):
        assert run_verb("status")[0] == 0
        secret.chmod(0o644)
        status, printed = run_verb("status")
        assert status == 2
        assert "has mode 0644" in printed


@pytest.mark.slow
def test_run_works_without_a_run_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "hello.py").write_text("print('hello')")
    ended = subprocess.run(
        [sys.executable, "-m", "asyncrpc", "run", str(tmp_path / "hello.py")],
        env={
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "ASYNCRPC_RUN_DIR": str(tmp_path / "file"),
        },
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout == "hello\n"
    assert ended.stderr.startswith("asyncrpc run: warning: no run directory (")


@contextlib.contextmanager
def dashboard(*, on_terminal: bool) -> Iterator[tuple[str, str]]:
    """Serve the dashboard of the only run; yield what it prints: a link, and more."""
    ours, theirs = os.openpty() if on_terminal else os.pipe()
    command = (sys.executable, "-m", "asyncrpc", "dashboard", "--port=0")
    with (
        os.fdopen(ours, encoding="utf-8") as output,
        subprocess.Popen(
            command, stdout=theirs, stderr=subprocess.PIPE, text=True
        ) as process,
    ):
        os.close(theirs)
        assert process.stderr is not None
        try:
            link = output.readline().strip()
            yield link, "" if on_terminal else process.stderr.readline()
        finally:
            process.terminate()
            process.wait(LIMIT_S)


def signs_in(link: str, **content: str) -> int:
    """Return the status of an attempt to sign in."""
    request = urllib.request.Request(  # noqa: S310  (it is ours, on loopback)
        f"{link.partition('#')[0]}login",
        json.dumps(content).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:  # noqa: S310
            status: int = answer.status
            return status
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_dashboard_ticket_admits_its_starter_alone(tmp_path: Path, place: Path) -> None:
    with run_of(tmp_path, "train", 1) as launcher:
        with dashboard(on_terminal=True) as (link, _):
            ticket = link.partition("#ticket=")[2]
            assert len(ticket) == 64
            for wrong in ("", ticket[:-1], ticket.upper() + "x"):
                assert signs_in(link, ticket=wrong) == 403
            assert [signs_in(link, ticket=ticket) for _ in range(2)] == [200, 403]
        # What is not a terminal may be a file that others read.
        with dashboard(on_terminal=False) as (link, more):
            assert "#" not in link
            assert signs_in(link, ticket="") == 403
            secret = place / f"train-{launcher.pid}" / "secret"
            assert more.strip().endswith(
                f"of train-{launcher.pid}, which is in {secret}"
            )
            assert secret.stat().st_mode & 0o077 == 0
