"""Runs are looked for where only their user can have put them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from asyncrpc.core.host.run_places import (
    FILE_BYTES_MAX,
    make_place,
    places,
    problem_of_directory,
    read_own,
)
from asyncrpc.errors import UsageError

NOBODY = 65534


@pytest.mark.parametrize(
    ("environ", "paths"),
    [
        ({"ASYNCRPC_RUN_DIR": "/a", "XDG_RUNTIME_DIR": "/b"}, ["/a"]),
        ({"XDG_RUNTIME_DIR": "/b"}, ["/b/asyncrpc", "/t/asyncrpc-runs-7"]),
        ({}, ["/run/user/7/asyncrpc", "/t/asyncrpc-runs-7"]),
        (
            {"ASYNCRPC_RUN_DIR": "", "XDG_RUNTIME_DIR": ""},
            ["/run/user/7/asyncrpc", "/t/asyncrpc-runs-7"],
        ),
    ],
)
def test_directories_follow_from_environment_variables(
    environ: dict[str, str], paths: list[str]
) -> None:
    candidates = places(environ, 7, Path("/t"))
    assert [str(place) for place in candidates] == paths


def test_first_writable_directory_is_created(tmp_path: Path) -> None:
    environ = {"XDG_RUNTIME_DIR": str(tmp_path / "missing")}
    place = make_place(places(environ, os.geteuid(), tmp_path))
    assert place.path == tmp_path / f"asyncrpc-runs-{os.geteuid()}"
    assert place.path.stat().st_mode & 0o777 == 0o700


def test_named_directory_has_no_fallback(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    environ = {"ASYNCRPC_RUN_DIR": str(blocked)}
    with pytest.raises(UsageError, match="file cannot be made: File exists"):
        make_place(places(environ, os.geteuid(), tmp_path))


def test_named_directory_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    environ = {"ASYNCRPC_RUN_DIR": str(tmp_path / "link")}
    assert make_place(places(environ, os.geteuid(), tmp_path)).path == tmp_path / "runs"
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    environ = {"ASYNCRPC_RUN_DIR": str(tmp_path / "loop")}
    with pytest.raises(UsageError, match="loop"):
        make_place(places(environ, os.geteuid(), tmp_path))


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o720, 0o702, 0o1777])
def test_directory_writable_by_others_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs").chmod(mode)
    environ = {"ASYNCRPC_RUN_DIR": str(tmp_path / "runs")}
    with pytest.raises(UsageError, match=f"mode {mode:04o}, so that others"):
        make_place(places(environ, os.geteuid(), tmp_path))


def test_link_in_a_shared_directory_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir(mode=0o700)
    user = os.geteuid()
    (tmp_path / f"asyncrpc-runs-{user}").symlink_to(tmp_path / "mine")
    environ = {"XDG_RUNTIME_DIR": str(tmp_path / "missing")}
    with pytest.raises(UsageError, match=f"asyncrpc-runs-{user} is not a directory"):
        make_place(places(environ, user, tmp_path))


def test_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    status = tmp_path.stat()
    assert problem_of_directory(status, status.st_uid) is None
    words = problem_of_directory(status, status.st_uid + 1)
    assert words == (
        f"belongs to user {status.st_uid}, not to you (user {status.st_uid + 1})"
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_file_of_another_user_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text("mine")
    assert read_own(path) == b"mine"
    os.chown(path, NOBODY, NOBODY)
    assert read_own(path) is None


def test_small_regular_files_alone_are_read(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    assert read_own(path) is None
    path.write_bytes(b"x" * FILE_BYTES_MAX)
    assert read_own(path) is not None
    path.write_bytes(b"x" * (FILE_BYTES_MAX + 1))
    assert read_own(path) is None
    (tmp_path / "link").symlink_to(path)
    assert read_own(tmp_path / "link") is None
    os.mkfifo(tmp_path / "pipe")  # without a writer, to open it would block
    assert read_own(tmp_path / "pipe") is None
    assert read_own(tmp_path) is None
