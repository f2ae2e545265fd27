"""Where file systems are full: an error says where, and all is well once there is room.

Each case runs in a process with mounts of its own, and so needs root.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

LIMIT_S = 120.0
CURE = "is: free some, or choose another directory"


def may_mount() -> bool:
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


mounts = pytest.mark.skipif(not may_mount(), reason="mounting needs root and unshare")


@pytest.fixture(params=["asyncio", "uvloop"])
def loop(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def printed(case: str, directory: Path, loop: str) -> list[str]:
    """Return the lines that a case prints."""
    module = "tests.integration.core.short_of_space"
    command = ["unshare", "--mount", sys.executable, "-m", module]
    ended = subprocess.run(
        [*command, case, str(directory), loop],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert not ended.returncode, ended.stderr
    return ended.stdout.splitlines()


@mounts
def test_failed_start_without_space_leaves_no_files(tmp_path: Path, loop: str) -> None:
    lines = printed("no_inode", tmp_path, loop)
    assert lines[1::2] == ["again ran 2 0"] * 4
    tried = lines[::2]
    assert sum("no space is left" in line for line in tried) >= 2
    for line in tried:
        assert line.endswith(" 0"), "it left files behind"
        assert "ran 2" in line or "free some, or choose another directory" in line


@mounts
def test_missing_writable_directory_is_reported(tmp_path: Path, loop: str) -> None:
    refused, again = printed("nowhere", tmp_path, loop)
    assert refused == (f"worker 'a' cannot start: no space is left where '/tmp' {CURE}")
    assert again == "again ran 2"


@mounts
def test_shared_tensors_need_no_room_in_dev_shm(tmp_path: Path, loop: str) -> None:
    assert printed("shared_memory", tmp_path, loop) == ["16777216.0 16777216.0"]


@mounts
def test_a_full_log_costs_no_call(tmp_path: Path, loop: str) -> None:
    assert printed("log", tmp_path, loop) == ["2"]


def test_command_reports_a_full_output() -> None:
    command = [sys.executable, "-m", "asyncrpc", "doctor"]
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert ended.returncode == 1
    assert ended.stderr == (
        "asyncrpc doctor: no space is left: free some, or choose another directory\n"
    )
