"""Workers of a cluster by SSH: the suite of all grounds, and what may be wrong."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from asyncrpc import Cluster, SshOptions
from asyncrpc.errors import ClusterError
from tests.clusters.ssh.sshd import Sshd, make_key
from tests.integration.clusters.test_grounds import (
    test_cluster_starts_calls_grows_and_shrinks,
    test_lost_worker_starts_again,
    test_no_process_outlives_the_program,
)
from tests.ports import free_port

__all__ = [
    "test_cluster_starts_calls_grows_and_shrinks",
    "test_lost_worker_starts_again",
    "test_no_process_outlives_the_program",
]

PATIENT_S: Final = 300.0


@pytest.fixture
def ground(sshd: Sshd) -> str:
    del sshd  # it runs
    return "ssh"


def by_ssh(sshd: Sshd, host: str | None = None, **ssh: Any) -> Cluster:
    access = {"client_keys": [str(sshd.key)], "known_hosts": str(sshd.known_hosts)}
    options = SshOptions(**{**access, **ssh})
    return Cluster.ssh([host or sshd.host], ssh=options, start_timeout_s=PATIENT_S)


async def problem_of(cluster: Cluster) -> str:
    with pytest.raises(ClusterError) as caught:
        await cluster.__aenter__()
    return str(caught.value)


async def test_error_names_the_problem_of_a_host(sshd: Sshd, tmp_path: Path) -> None:
    make_key(tmp_path / "other")
    (tmp_path / "nobody").write_text("")
    gone = f"127.0.0.1:{free_port()}"
    assert "cannot be reached" in await problem_of(by_ssh(sshd, gone))
    refused = await problem_of(by_ssh(sshd, client_keys=[str(tmp_path / "other")]))
    assert "accepts no key" in refused
    missing = await problem_of(by_ssh(sshd, client_keys=[str(tmp_path / "none")]))
    assert "cannot be read" in missing
    unknown = await problem_of(by_ssh(sshd, known_hosts=str(tmp_path / "nobody")))
    assert "is not in known_hosts" in unknown
    no_python = await problem_of(by_ssh(sshd, python="/no/python"))
    assert "no such interpreter" in no_python
    no_directory = await problem_of(by_ssh(sshd, directory="/no/directory"))
    assert "give directory=" in no_directory


async def test_python_without_asyncrpc_is_refused(sshd: Sshd) -> None:
    """The interpreter is right, but has no packages."""
    bare = Path(sys.base_prefix) / "bin" / "python3"
    problem = await problem_of(by_ssh(sshd, python=str(bare)))
    assert "cannot load asyncrpc" in problem
    assert "install asyncrpc and torch" in problem


async def test_jump_host_and_environment(sshd: Sshd) -> None:
    environment = {"OF_THE_HOSTS": "1"}
    async with by_ssh(sshd, jump=sshd.host, environment=environment) as cluster:
        assert await cluster["w0"].call(os.getenv, "OF_THE_HOSTS") == "1"
