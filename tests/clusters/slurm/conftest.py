"""One cluster for all tests here, and what starts programs on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.clusters.slurm.cluster import SlurmCluster, missing_programs


@pytest.fixture(scope="session")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Run the cluster of this session; skip where there can be none."""
    if missing := missing_programs():
        pytest.skip(f"needs {', '.join(missing)}: tests/clusters/install.sh")
    with SlurmCluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture
def cluster(shared_cluster: SlurmCluster) -> Iterator[SlurmCluster]:
    """Return the cluster with all nodes idle; afterwards no job is left."""
    yield shared_cluster
    shared_cluster.repair()  # a node that is gone would hold its job
    shared_cluster.end_jobs()
    shared_cluster.wait_idle()


@pytest.fixture(autouse=True)
def nothing_left_behind() -> None:
    """Do not count processes: a node that was lost gets a new daemon after its test."""
