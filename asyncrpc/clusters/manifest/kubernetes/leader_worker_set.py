"""A LeaderWorkerSet: for workers that serve without an end.

Its pods are restarted however they end, so a program that ends runs again.  If one pod
ends, its whole group does, so that the variables with the leader's address stay valid.
It tells each pod its index, the size of the group and the leader's address, and makes
the headless Service itself.

Source: kubernetes-sigs/lws, api/leaderworkerset/v1.
"""

from __future__ import annotations

from asyncrpc.clusters.manifest.kubernetes.network import network_policy
from asyncrpc.clusters.manifest.kubernetes.pod import (
    Object,
    metadata,
    pod_template,
    variable,
)
from asyncrpc.clusters.manifest.kubernetes.workload import Workload


def leader_worker_set(workload: Workload) -> list[Object]:
    """Return the objects of a LeaderWorkerSet with one group."""
    workload.check_pod_names("-0")
    variables = [variable("MASTER_PORT", str(workload.port))]
    manifest = {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": metadata(workload),
        "spec": {
            "replicas": 1,
            # Not LeaderReady: the leader is ready only after all have joined.
            "startupPolicy": "LeaderCreated",
            "networkConfig": {"subdomainPolicy": "Shared"},
            "leaderWorkerTemplate": {
                "size": workload.workers,
                "restartPolicy": "RecreateGroupOnPodRestart",
                "workerTemplate": pod_template(
                    workload, variables, restart_policy="Always"
                ),
            },
        },
    }
    return [network_policy(workload), manifest]
