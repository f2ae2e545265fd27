"""The kinds of workload, each with the function that makes its objects.

A LeaderWorkerSet: for workers that serve without an end.

Its pods are restarted however they end, so a program that ends runs again.  If one pod
ends, its whole group does, so that the variables with the leader's address stay valid.
It tells each pod its index, the size of the group and the leader's address, and makes
the headless Service itself.

A TrainJob of Kubeflow Trainer 2, with a TrainingRuntime of its own.

The runtime is the template, and the TrainJob one run of it.  Trainer makes a JobSet of
them, and sets torchrun's PET variables, from which a pod knows its rank: one process in
each pod, always at port 29500.

A RayJob of KubeRay: a cluster of Ray for one program, which has a `Cluster.ray` in it.

The program runs on the head, and Ray places its workers on the other pods.  KubeRay
makes the commands, the probes and the head's Service.

Source: ray-project/kuberay, ray-operator/apis/ray/v1.

Source: kubeflow/trainer, pkg/apis/trainer/v1alpha1 and pkg/runtime/framework/plugins.

Source: kubernetes-sigs/lws, api/leaderworkerset/v1.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Mapping
from typing import Final

from asyncrpc.clusters.manifest.kubernetes.job import indexed_job
from asyncrpc.clusters.manifest.kubernetes.jobset import (
    fails_at_once,
    job_set,
    network,
    restart_variable,
    restarts_all,
)
from asyncrpc.clusters.manifest.kubernetes.network import network_policy
from asyncrpc.clusters.manifest.kubernetes.pod import (
    Object,
    labels,
    metadata,
    pod_template,
    variable,
)
from asyncrpc.clusters.manifest.kubernetes.workload import (
    RENDEZVOUS_PORT,
    ProbeKind,
    Workload,
)
from asyncrpc.errors import UsageError

_DASHBOARD_PORT: Final = 8265  # where the operator asks for the job's state
_OPERATOR: Final = {"app.kubernetes.io/component": "kuberay-operator"}


def ray_job(workload: Workload) -> list[Object]:
    """Return the objects of a RayJob."""
    if workload.probe.kind is not ProbeKind.NONE:
        raise UsageError("--probe must be none for Ray: KubeRay sets its own probes")
    manifest = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": metadata(workload),
        "spec": {
            "entrypoint": shlex.join(workload.command),
            "shutdownAfterJobFinishes": True,
            "submissionMode": "K8sJobMode",
            "submitterPodTemplate": _submitter(workload),
            "rayClusterSpec": {
                "headGroupSpec": _head(workload),
                "workerGroupSpecs": [_workers(workload)],
            },
        },
    }
    operator = {
        "namespaceSelector": {},
        "podSelector": {"matchLabels": dict(_OPERATOR)},
    }
    port = {"port": _DASHBOARD_PORT, "protocol": "TCP"}
    policy = network_policy(workload, {"from": [operator], "ports": [port]})
    return [policy, manifest]


def _head(workload: Workload) -> Object:
    """Return the head, which offers no cores, so that workers run on other pods."""
    resources = dataclasses.replace(workload.resources, gpus=0)
    without_gpus = dataclasses.replace(workload, resources=resources)
    return {
        "rayStartParams": {"dashboard-host": "0.0.0.0", "num-cpus": "0"},  # noqa: S104
        "template": _template(without_gpus, "ray-head"),
    }


def _workers(workload: Workload) -> Object:
    count = workload.workers
    return {
        "groupName": "workers",
        "replicas": count,
        "minReplicas": count,
        "maxReplicas": count,
        "rayStartParams": {},
        "template": _template(workload, "ray-worker"),
    }


def _template(workload: Workload, container: str) -> Object:
    """Return the template of a pod whose command KubeRay makes."""
    template = pod_template(workload, [], restart_policy="Always", container=container)
    del template["spec"]["containers"][0]["command"]
    return template


def _submitter(workload: Workload) -> Object:
    """Return the pod that submits the program to the head, which must allow it."""
    container = {"name": "ray-job-submitter", "image": workload.image}
    return {
        "metadata": {"labels": labels(workload)},
        "spec": {"restartPolicy": "Never", "containers": [container]},
    }


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


KINDS: Final[Mapping[str, Callable[[Workload], list[Object]]]] = {
    "job": indexed_job,
    "jobset": job_set,
    "lws": leader_worker_set,
    "trainjob": train_job,
    "ray": ray_job,
}
