"""Workers of a cluster on the nodes of a job: the suite of all grounds."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

import pytest

from asyncrpc import Cluster, SlurmOptions
from asyncrpc.errors import ClusterError
from tests.clusters.slurm.cluster import SlurmCluster
from tests.commands import REPOSITORY
from tests.integration.clusters.test_grounds import (
    test_cluster_starts_calls_grows_and_shrinks,
    test_lost_worker_starts_again,
    test_no_process_outlives_the_program,
)

__all__ = [
    "test_cluster_starts_calls_grows_and_shrinks",
    "test_lost_worker_starts_again",
    "test_no_process_outlives_the_program",
]

PATIENT_S: Final = 300.0


@pytest.fixture
def ground(cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let this process and its programs find the cluster; all nodes are idle."""
    for name in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(name, cluster.environ[name])
    return "slurm"


async def test_workers_are_on_the_nodes_and_the_job_ends_with_the_block(
    ground: str, cluster: SlurmCluster
) -> None:
    assert ground == "slurm"
    async with Cluster.slurm(3, start_timeout_s=PATIENT_S) as workers:
        names = [(await peer.call(os.uname)).nodename for peer in workers.peers]
        assert sorted(names) == ["node1", "node2", "node3"]
    cluster.wait_for(lambda: not cluster.run("squeue", "-h"), "no job is left")


async def test_queue_that_gives_no_nodes_in_time_is_an_error(
    ground: str, cluster: SlurmCluster
) -> None:
    assert ground == "slurm"
    several = SlurmOptions(arguments=["--exclusive"], queue_timeout_s=1.0)
    async with Cluster.slurm(3, slurm=several, start_timeout_s=PATIENT_S) as workers:
        assert len(workers) == 3
        with pytest.raises(ClusterError, match="gave no 3 nodes within 1 s"):
            await Cluster.slurm(3, slurm=several).__aenter__()
        wrong = SlurmOptions(arguments=["--partition=none"])
        with pytest.raises(ClusterError, match="invalid partition"):
            await Cluster.slurm(1, slurm=wrong).__aenter__()
        assert len(cluster.run("squeue", "-h").splitlines()) == 1


INSIDE: Final = """
import os
import asyncrpc

async def main():
    async with asyncrpc.Cluster.slurm(2, start_timeout_s=300.0) as cluster:
        names = [(await peer.call(os.uname)).nodename for peer in cluster.peers]
        print(*names, flush=True)

if __name__ == "__main__":
    asyncrpc.run(main())
"""


def test_nodes_of_a_job_are_used_inside_it(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(INSIDE)
    batch = tmp_path / "job"
    batch.write_text(
        f"#!/bin/sh\nPYTHONPATH={REPOSITORY} exec {sys.executable} {program}\n"
    )
    output = tmp_path / "output"
    where = f"--chdir={tmp_path}"
    job = cluster.submit(batch, "--nodes=2", f"--output={output}", where)
    state = cluster.wait_state(job, "COMPLETED", "FAILED")["JobState"]
    assert state == "COMPLETED", output.read_text()
    assert output.read_text().split() == ["node1", "node2"]
