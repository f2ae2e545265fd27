"""A `Cluster` in bundles of a real Ray cluster; `scenarios` has what is played."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys

import pytest

pytest.importorskip("ray", reason="needs the extra [ray]")

from tests.clusters.ray.conftest import ROOT, Session
from tests.clusters.ray.misuse import MISUSES
from tests.clusters.ray.scenarios import SCENARIOS


@pytest.mark.parametrize("name", [*SCENARIOS, *MISUSES])
def test_cluster_passes_the_scenario(session: Session, name: str) -> None:
    session.play(name)
    session.play("no_placement_group_is_left")


def test_workers_end_with_their_driver(session: Session) -> None:
    """The driver is killed: workers and placement group belong to its job."""
    driver = subprocess.Popen(
        [sys.executable, "-m", "tests.clusters.ray.driver", session.address],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert driver.stdout is not None
    # Ray may print something before, such as that a node is gone.
    pids = next(line for line in driver.stdout if line.startswith("["))
    workers = [os.pidfd_open(pid) for pid in json.loads(pids)]
    driver.kill()
    driver.communicate()
    for worker in workers:
        select.select([worker], [], [])
        os.close(worker)
    session.play("no_placement_group_is_left")
