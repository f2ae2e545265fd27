"""A TrainJob of Kubeflow Trainer 2, with a TrainingRuntime of its own.

The runtime is the template, and the TrainJob one run of it.  Trainer makes a JobSet of
them, and sets torchrun's PET variables, from which a pod knows its rank: one process in
each pod, always at port 29500.

Source: kubeflow/trainer, pkg/apis/trainer/v1alpha1 and pkg/runtime/framework/plugins.
"""

from __future__ import annotations

from typing import Final

from asyncrpc.clusters.manifest.kubernetes.jobset import (
    fails_at_once,
    network,
    restart_variable,
    restarts_all,
)
from asyncrpc.clusters.manifest.kubernetes.network import network_policy
from asyncrpc.clusters.manifest.kubernetes.pod import Object, metadata, pod_template
from asyncrpc.clusters.manifest.kubernetes.workload import RENDEZVOUS_PORT, Workload
from asyncrpc.errors import UsageError

_GROUP: Final = "trainer.kubeflow.org"
_NODE: Final = "node"  # Trainer's name of the Job, and of the container that it changes
_STEP: Final = {f"{_GROUP}/trainjob-ancestor-step": "trainer"}
_RANDOM: Final = "-xxxxx"  # what a Job appends to the names of its pods


def train_job(workload: Workload) -> list[Object]:
    """Return the objects of a TrainJob."""
    workload.check_pod_names(f"-{_NODE}-0", _RANDOM)
    if workload.port != RENDEZVOUS_PORT:
        raise UsageError(
            f"--port must be {RENDEZVOUS_PORT} for a TrainJob, whose controller sets "
            f"PET_MASTER_PORT, not {workload.port}"
        )
    reference = {"apiGroup": _GROUP, "kind": "TrainingRuntime", "name": workload.name}
    run = {
        "apiVersion": f"{_GROUP}/v1alpha1",
        "kind": "TrainJob",
        "metadata": metadata(workload),
        # The variables are set only where `trainer` is given.
        "spec": {"runtimeRef": reference, "trainer": {"numNodes": workload.workers}},
    }
    return [network_policy(workload), _runtime(workload), run]


def _runtime(workload: Workload) -> Object:
    template = pod_template(
        workload, [restart_variable()], restart_policy="Never", container=_NODE
    )
    job = {
        "name": _NODE,
        "template": {
            "metadata": {"labels": dict(_STEP)},
            "spec": {**fails_at_once(_NODE), "template": template},
        },
    }
    spec = {
        "network": network(workload),
        "failurePolicy": restarts_all(workload),
        "replicatedJobs": [job],
    }
    return {
        "apiVersion": f"{_GROUP}/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": metadata(workload),
        "spec": {
            "mlPolicy": {
                "numNodes": workload.workers,
                "torch": {"numProcPerNode": 1},
            },
            "template": {"spec": spec},
        },
    }
