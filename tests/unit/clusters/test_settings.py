"""What a program says of other hosts is checked before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrpc import Cluster, RayOptions, SlurmOptions, SshOptions
from asyncrpc.clusters.remote.boot import moved
from asyncrpc.clusters.remote.options import SshTarget
from asyncrpc.errors import UsageError

WRONG: tuple[Any, ...] = (1, b"x", object(), 1.5, ["x", 1], [None])


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("a", ("a", None, None)),
        ("u@a", ("a", "u", None)),
        ("a:2222", ("a", None, 2222)),
        ("u@[::1]:22", ("::1", "u", 22)),
    ],
)
def test_host_is_read(text: str, target: tuple[str, str | None, int | None]) -> None:
    read = SshTarget.parse(text)
    assert (read.host, read.username, read.port) == target


@pytest.mark.parametrize("text", ["", "a:b", "a/b", "u:p@a", "a:99999", "@", "[::1"])
def test_host_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="hosts"):
        SshTarget.parse(text)


def test_paths_move_with_their_directory() -> None:
    assert moved("/home/me/x.py", "/home/me", "/srv") == "/srv/x.py"
    assert moved("/home/me", "/home/me", "/srv") == "/srv"
    assert moved("/home/mean", "/home/me", "/srv") == "/home/mean"
    assert moved("/home/me/x.py", "/home/me", "") == "/home/me/x.py"


def test_wrong_options_are_refused() -> None:
    for wrong in WRONG:
        for name in ("username", "known_hosts", "jump", "python", "directory"):
            with pytest.raises(UsageError, match=name if name != "jump" else "jump"):
                SshOptions(**{name: wrong})
        for name in ("client_keys", "environment"):
            with pytest.raises(UsageError, match=name):
                SshOptions(**{name: wrong})
        for name in ("arguments", "python", "directory", "environment"):
            with pytest.raises(UsageError, match=name):
                SlurmOptions(**{name: wrong})
        for name in ("strategy", "runtime_env", "python", "directory", "environment"):
            with pytest.raises(UsageError, match=name):
                RayOptions(**{name: wrong})
    for seconds in ("1", -1, None, float("nan")):
        with pytest.raises(UsageError, match="connect_timeout_s"):
            SshOptions(connect_timeout_s=seconds)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="queue_timeout_s"):
            SlurmOptions(queue_timeout_s=seconds)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="placement_timeout_s"):
            RayOptions(placement_timeout_s=seconds)  # type: ignore[arg-type]
    for port in (0, 70000, "22", True):
        with pytest.raises(UsageError, match="port"):
            SshOptions(port=port)  # type: ignore[arg-type]


def test_wrong_clusters_are_refused() -> None:
    pytest.importorskip("asyncssh", reason="needs asyncssh: the extra ssh")
    for wrong in (*WRONG, "a", [], None, ["a b/c"]):
        with pytest.raises(UsageError, match="hosts"):
            Cluster.ssh(wrong)
    for wrong in (*WRONG, [], None, "tcp://", "../up", "x" * 65, "a b"):
        with pytest.raises(UsageError):
            Cluster.attach(wrong)
    for count in (-1, "1", 1.5, None):
        with pytest.raises(UsageError, match="workers_per_host"):
            Cluster.ssh(["a"], count)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="workers_per_node"):
            Cluster.slurm(1, count)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="nodes"):
            Cluster.slurm(count)  # type: ignore[arg-type]
    for wrong in WRONG:
        with pytest.raises(UsageError, match="an SshOptions"):
            Cluster.ssh(["a"], ssh=wrong)
        with pytest.raises(UsageError, match="a SlurmOptions"):
            Cluster.slurm(slurm=wrong)
        with pytest.raises(UsageError, match="keep"):
            Cluster(keep=wrong)
    with pytest.raises(UsageError, match="keep=True is not for"):
        Cluster.slurm(keep=True)
    with pytest.raises(UsageError, match="letters, digits"):
        Cluster(name="no/path", keep=True)
