"""A simulated cluster for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clusters.kubernetes.cluster import SimulatedCluster, simulated_cluster
from tests.clusters.network.hosts import network, why_not


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[SimulatedCluster]:
    if why := why_not():
        pytest.skip(why)
    with network(tmp_path) as net, simulated_cluster(net, tmp_path) as simulated:
        yield simulated
