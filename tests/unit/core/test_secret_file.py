"""A secret comes from a file that nobody else can read; the mode decides."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from asyncrpc.core.host.secret_file import SECRET_BYTES_MAX, problem_of, read_secret
from asyncrpc.core.options import Options
from asyncrpc.errors import UsageError

ME, ROOT, OTHER = 1000, 0, 1001


def file_status(mode: int, owner: int = ME, kind: int = stat.S_IFREG) -> os.stat_result:
    return os.stat_result((kind | mode, 0, 0, 1, owner, 1000, 6, 0, 0, 0))


@pytest.mark.parametrize(
    ("mode", "owner"),
    [
        (0o600, ME),
        (0o400, ME),
        (0o700, ME),
        (0o600, ROOT),
        (0o400, ROOT),  # as Kubernetes mounts it with defaultMode 0400, for root
        (0o440, ROOT),  # and for another user, whose group is the pod's fsGroup
        (0o640, ROOT),
    ],
)
def test_private_file_is_accepted(mode: int, owner: int) -> None:
    assert problem_of(file_status(mode, owner), ME) is None


@pytest.mark.parametrize("owner", [ME, ROOT])
@pytest.mark.parametrize("others", [0o004, 0o002, 0o001, 0o007])
@pytest.mark.parametrize("mode", [0o600, 0o400, 0o440])
def test_file_open_to_everybody_is_refused(mode: int, others: int, owner: int) -> None:
    problem = problem_of(file_status(mode | others, owner), ME)
    assert problem is not None
    assert f"mode {mode | others:04o}" in problem
    assert "chmod 600" in problem
    assert "defaultMode" in problem


@pytest.mark.parametrize("mode", [0o640, 0o440, 0o660])
def test_group_access_to_a_file_of_the_user_is_refused(mode: int) -> None:
    problem = problem_of(file_status(mode), ME)
    assert problem is not None
    assert "chmod 600" in problem


def test_root_file_writable_by_a_group_is_refused() -> None:
    assert problem_of(file_status(0o660, ROOT), ME) is not None


def test_file_of_another_user_is_refused() -> None:
    problem = problem_of(file_status(0o600, OTHER), ME)
    assert problem is not None
    assert "user 1001" in problem
    assert problem_of(file_status(0o600, OTHER), ROOT) is not None


@pytest.mark.parametrize("kind", [stat.S_IFIFO, stat.S_IFDIR, stat.S_IFCHR])
def test_regular_file_alone_is_read(kind: int) -> None:
    assert problem_of(file_status(0o600, kind=kind), ME) == "must be a regular file"


# --- real files -----------------------------------------------------------------------


def secret_at(path: Path, content: bytes = b"s3cret\n", mode: int = 0o600) -> str:
    path.write_bytes(content)
    path.chmod(mode)
    return str(path)


def test_trailing_newline_does_not_count(tmp_path: Path) -> None:
    for end in (b"", b"\n", b"\r\n"):
        path = secret_at(tmp_path / "secret", b"s3cret" + end)
        assert read_secret(path, "x") == b"s3cret"


def test_links_are_followed_as_kubernetes_makes_them(tmp_path: Path) -> None:
    folder = tmp_path / "..2026_11_25"
    folder.mkdir()
    secret_at(folder / "secret")
    (tmp_path / "..data").symlink_to(folder.name)
    (tmp_path / "secret").symlink_to("..data/secret")
    assert read_secret(str(tmp_path / "secret"), "x") == b"s3cret"


def test_unreadable_file_is_reported_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"x: cannot read .*none.*umask 077"):
        read_secret(str(tmp_path / "none"), "x")
    with pytest.raises(UsageError, match="regular file"):
        read_secret(str(tmp_path), "x")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    with pytest.raises(UsageError, match="regular file"):
        read_secret(str(pipe), "x")  # and it does not wait for a writer


@pytest.mark.parametrize("content", [b"", b"\n", b"x" * (SECRET_BYTES_MAX + 1)])
def test_secret_length_is_limited(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(UsageError, match="1 to 4096 bytes"):
        read_secret(secret_at(tmp_path / "secret", content), "x")


# --- where it is given ----------------------------------------------------------------


def test_options_read_the_file_when_the_worker_is_created(tmp_path: Path) -> None:
    options = Options(secret_file=secret_at(tmp_path / "secret"))
    assert options.secret is None
    read = options.with_environment({"ASYNCRPC_SECRET": "other"})
    assert read.secret == b"s3cret"
    assert read.is_guarded
    assert "s3cret" not in repr(read)
    assert read.with_environment({}) == read


def test_environment_may_name_the_file(tmp_path: Path) -> None:
    path = secret_at(tmp_path / "secret")
    environ = {"ASYNCRPC_SECRET_FILE": path}
    assert Options().with_environment(environ).secret == b"s3cret"
    assert Options(secret="mine").with_environment(environ).secret == "mine"
    assert Options().with_environment({"ASYNCRPC_SECRET_FILE": ""}).secret is None


def test_contradicting_secrets_are_an_error(tmp_path: Path) -> None:
    path = secret_at(tmp_path / "secret")
    environ = {"ASYNCRPC_SECRET_FILE": path, "ASYNCRPC_SECRET": "s3cret"}
    assert Options().with_environment(environ).secret == b"s3cret"
    environ["ASYNCRPC_SECRET"] = "another"
    with pytest.raises(UsageError) as refused:
        Options().with_environment(environ)
    for named in ("ASYNCRPC_SECRET ", "ASYNCRPC_SECRET_FILE", path):
        assert named in str(refused.value)
    assert "s3cret" not in str(refused.value)


def test_file_readable_by_others_is_refused_by_its_name(tmp_path: Path) -> None:
    path = secret_at(tmp_path / "secret", mode=0o644)
    with pytest.raises(UsageError, match=r"ASYNCRPC_SECRET_FILE: .*0644.*chmod 600"):
        Options().with_environment({"ASYNCRPC_SECRET_FILE": path})
    with pytest.raises(UsageError, match=r"Options\.secret_file: .*0644"):
        Options(secret_file=path).with_environment({})


def test_secret_and_secret_file_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not both"):
        Options(secret="a", secret_file="b")
    with pytest.raises(UsageError, match="secret_file"):
        Options(secret_file="")
    assert tmp_path.exists()
