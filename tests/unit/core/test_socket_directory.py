"""A worker's directory goes with it, or with the next worker if it was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from asyncrpc.core.host import socket_directory
from asyncrpc.core.host.socket_directory import SocketDirectory

MAKE_ONE = """
from asyncrpc.core.host.socket_directory import SocketDirectory
kept = SocketDirectory()
print(kept.path, flush=True)
input()
"""


@pytest.fixture(autouse=True)
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_directory_is_private_and_removed_with_its_worker(parent: Path) -> None:
    directory = SocketDirectory()
    assert directory.path.parent == parent
    assert directory.path.stat().st_mode & 0o777 == 0o700
    directory.remove()
    assert not directory.path.exists()


def test_directories_of_killed_workers_alone_are_removed(parent: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(parent)}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", MAKE_ONE],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    paths = [
        Path(process.stdout.readline().strip()) for process in started if process.stdout
    ]
    assert all(path.is_dir() for path in paths)
    started[0].send_signal(signal.SIGKILL)
    started[0].wait()
    assert paths[0].is_dir()  # nobody was left to remove it
    mine = SocketDirectory()
    assert not paths[0].exists()
    assert paths[1].is_dir()
    started[1].communicate("\n")
    assert not paths[1].exists()
    mine.remove()
    for process in started:
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def test_foreign_directory_stays(parent: Path) -> None:
    foreign = parent / "asyncrpc-notes"
    foreign.mkdir()
    (foreign / "text").write_text("kept")
    directory = SocketDirectory()
    assert (foreign / "text").read_text() == "kept"
    directory.remove()


def test_forked_child_leaves_the_directory_to_its_parent(parent: Path) -> None:
    directory = SocketDirectory()
    directory.disown()
    del directory
    assert [path.name.startswith("asyncrpc-") for path in parent.iterdir()] == [True]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to another user")
def test_directories_of_other_users_do_not_stop_the_clean_up(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket_directory, "SWEPT_MAX", 1)
    for number in range(8):
        other = parent / f"asyncrpc-{number}"
        other.mkdir()
        os.chown(other, 65534, 65534)
    dead = parent / "asyncrpc-dead"
    dead.mkdir()
    (dead / "alive").touch()
    SocketDirectory().remove()
    assert not dead.exists()
    assert len(list(parent.iterdir())) == 8
