"""A pod that is started by a manifest finds its place from its variables alone.

Each test adds to the variables of the manifest what the controller of that kind sets,
and asks the resolver of `env://`.
"""

from __future__ import annotations

from typing import Any

import pytest

from asyncrpc.core.environment import LaunchPlacement, resolve
from tests.unit.clusters.manifest.kubernetes.test_manifests import workers
from tests.unit.clusters.manifest.kubernetes.workloads import small

# What controllers set, for the pod of index 2 of 4.
CONTROLLERS: dict[str, dict[str, str]] = {
    "job": {"JOB_COMPLETION_INDEX": "2"},
    "jobset": {"JOB_COMPLETION_INDEX": "2", "JOBSET_RESTART_ATTEMPT": "1"},
    "lws": {
        "LWS_LEADER_ADDRESS": "trainer-0.trainer.research",
        "LWS_GROUP_SIZE": "4",
        "LWS_WORKER_INDEX": "2",
    },
    "trainjob": {
        "JOB_COMPLETION_INDEX": "2",
        "JOBSET_RESTART_ATTEMPT": "1",
        "PET_NNODES": "4",
        "PET_NPROC_PER_NODE": "1",
        "PET_NODE_RANK": "2",
        "PET_MASTER_ADDR": "trainer-node-0-0.trainer",
        "PET_MASTER_PORT": "29500",
    },
}
HOSTS = {
    "job": "trainer-0.trainer",
    "jobset": "trainer-worker-0-0.trainer",
    "lws": "trainer-0.trainer.research",
    "trainjob": "trainer-node-0-0.trainer",
}
LAUNCHERS = {
    "job": "indexed Job",
    "jobset": "indexed Job",
    "lws": "LeaderWorkerSet",
    "trainjob": "Kubeflow",
}


def placement(kind: str, **more: Any) -> LaunchPlacement:
    (worker,) = workers(kind, small(**more))
    environment = {
        variable["name"]: variable["value"]
        for variable in worker["env"]
        if "value" in variable
    }
    return resolve(environment | CONTROLLERS[kind])


@pytest.mark.parametrize("kind", CONTROLLERS)
def test_pod_finds_its_placement(kind: str) -> None:
    resolved = placement(kind)
    assert (resolved.rank, resolved.world_size, resolved.name) == (2, 4, "worker2")
    assert (resolved.host, resolved.port) == (HOSTS[kind], 29_500)
    assert resolved.launcher == LAUNCHERS[kind]
    assert resolved.restart == int(CONTROLLERS[kind].get("JOBSET_RESTART_ATTEMPT", "0"))


@pytest.mark.parametrize("kind", ["job", "jobset", "lws"])
def test_given_port_is_taken(kind: str) -> None:
    assert placement(kind, port=7000).port == 7000
