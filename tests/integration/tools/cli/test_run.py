"""`python -m asyncrpc run`: real processes of real scripts."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrpc.tools.cli.main import main
from tests.integration.core.multiprocessing.pidfds import have_ended, opened

REPOSITORY = Path(__file__).parents[4]
LIMIT_S = 60.0  # that only a failure reaches
BARE = {
    name: value
    for name, value in os.environ.items()
    if name not in {"ASYNCRPC_SECRET", "OMP_NUM_THREADS", "PYTHONUNBUFFERED"}
}

TELL = """
import os, sys
for name in ("RANK", "WORLD_SIZE", "ASYNCRPC_SECRET", "OMP_NUM_THREADS"):
    print(name, os.environ[name])
print("arguments", *sys.argv[1:])
"""
MEET = """
from datetime import timedelta
import torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=timedelta(seconds=200))
total = torch.ones(1)
dist.all_reduce(total)
print("met", int(total.item()))
dist.destroy_process_group()
"""
FAIL = """
import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit(7)
time.sleep(3600)
"""
DIE = FAIL.replace("sys.exit(7)", "os.kill(os.getpid(), 9)")
WAIT = """
import os, signal, sys, time
if "stubborn" in sys.argv:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("pid", os.getpid())
time.sleep(3600)
"""
SAVE = """
import os, signal, sys, time
def save(*_):
    time.sleep(1.5)  # longer than what has nothing to save is given
    print("saved")
    sys.exit(int(sys.argv[1]))
signal.signal(signal.SIGTERM, save)
print("pid", os.getpid())
while True:
    time.sleep(3600)
"""


@contextlib.contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-m", "asyncrpc", *arguments],
        env={**BARE, "PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def run(*arguments: str) -> tuple[int, list[str], str]:
    with running(*arguments) as process:
        output, errors = process.communicate(timeout=4 * LIMIT_S)
    return process.returncode, output.splitlines(), errors


def written(folder: Path, text: str) -> str:
    path = folder / "script.py"
    path.write_text(text)
    return str(path)


def test_processes_get_their_rank_and_a_common_secret(tmp_path: Path) -> None:
    script = written(tmp_path, TELL)
    code, lines, errors = run("run", "--nproc", "2", script, "--lr", "3")
    assert (code, errors) == (0, "")
    for rank in (0, 1):
        assert f"[{rank}] RANK {rank}" in lines
        assert f"[{rank}] WORLD_SIZE 2" in lines
        assert f"[{rank}] arguments --lr 3" in lines
    secrets = {line.split()[2] for line in lines if "ASYNCRPC_SECRET" in line}
    assert len(secrets) == 1
    assert len(secrets.pop()) == 64


def test_a_process_alone_has_our_terminal_and_no_prefix(tmp_path: Path) -> None:
    _, lines, _ = run("run", "--threads", "3", written(tmp_path, TELL))
    assert "RANK 0" in lines
    assert "OMP_NUM_THREADS 3" in lines


@pytest.mark.slow
def test_torch_finds_its_rendezvous_in_the_environment(tmp_path: Path) -> None:
    code, lines, errors = run("run", "--nproc", "2", written(tmp_path, MEET))
    assert (code, sorted(lines)) == (0, ["[0] met 2", "[1] met 2"]), errors


@pytest.mark.slow
def test_a_module_runs_by_its_name() -> None:
    code, lines, _ = run("run", "-m", "json.tool", "--help")
    assert code == 0
    assert lines[0].startswith("usage:")


@pytest.mark.parametrize(
    ("script", "code", "words"),
    [
        (FAIL, 7, "rank 1 exited with code 7"),
        (DIE, 137, "rank 1 was killed by SIGKILL"),
    ],
)
def test_first_failure_stops_the_others_and_sets_the_exit_code(
    tmp_path: Path, script: str, code: int, words: str
) -> None:
    got, _, errors = run("run", "--nproc", "2", written(tmp_path, script))
    assert got == code
    assert words in errors
    assert "the others have been stopped" in errors


@pytest.mark.parametrize("manner", ["orderly", "stubborn"])
@pytest.mark.parametrize("nprocs", [1, 2])
def test_ctrl_c_ends_all_processes(tmp_path: Path, manner: str, nprocs: int) -> None:
    script = written(tmp_path, WAIT)
    with running("run", "--nproc", str(nprocs), script, manner) as process:
        pids = read_pids(process, nprocs)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize(("code", "status"), [("75", 75), ("3", 143)])
def test_grace_lets_programs_save_and_sets_the_exit_code(
    tmp_path: Path, code: str, status: int
) -> None:
    script = written(tmp_path, SAVE)
    with running("run", "--nproc", "2", "--grace", "600", script, code) as process:
        read_pids(process, 2)
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)  # schedulers repeat it
        output, _ = process.communicate(timeout=4 * LIMIT_S)
    assert sorted(output.splitlines()) == ["[0] saved", "[1] saved"]
    assert process.returncode == status


@pytest.mark.slow
def test_processes_read_the_secret_from_the_file(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.touch(0o600)
    file.write_text("of the file")
    ask = "import asyncrpc; print(asyncrpc.Options().with_environment().secret)"
    done = subprocess.run(
        [sys.executable, "-m", "asyncrpc", "run", written(tmp_path, ask)],
        env={**BARE, "PYTHONPATH": str(REPOSITORY), "ASYNCRPC_SECRET_FILE": str(file)},
        capture_output=True,
        text=True,
        timeout=4 * LIMIT_S,
        check=False,
    )
    assert done.stdout == "b'of the file'\n", done.stderr


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the tie is Linux's")
def test_the_processes_of_a_killed_run_die(tmp_path: Path) -> None:
    script = written(tmp_path, WAIT)
    with (
        running("run", "--nproc", "2", script, "stubborn") as process,
        opened(read_pids(process, 2)) as children,
    ):
        process.kill()
        assert have_ended(children, within_s=LIMIT_S)


def read_pids(process: subprocess.Popen[str], nprocs: int) -> list[int]:
    assert process.stdout is not None
    assert process.stderr is not None
    lines = [process.stdout.readline() for _ in range(nprocs)]
    assert all(lines), process.stderr.read()
    return [int(line.split()[-1]) for line in lines]


def test_wrong_arguments_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "no/such.py"]) == 2
    assert "the file 'no/such.py' does not exist" in capsys.readouterr().err
    assert main(["run", "--nproc", "0", __file__]) == 2
    assert "--nproc must be at least 1, not 0" in capsys.readouterr().err
    assert main(["run", "--threads", "0", __file__]) == 2
    assert "--threads must be an integer of at least 1" in capsys.readouterr().err


def test_version_output_has_the_facts_of_a_report(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    assert "asyncrpc-torch" in printed
    assert "torch 2." in printed
