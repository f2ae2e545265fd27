"""A RayJob of KubeRay: a cluster of Ray for one program, which makes a `Gang` in it.

The program runs on the head, and Ray places its workers on the other pods.  KubeRay
makes the commands, the probes and the head's Service.

Source: ray-project/kuberay, ray-operator/apis/ray/v1.
"""

from __future__ import annotations

import dataclasses
import shlex
from typing import Final

from asyncrpc.clusters.manifest.kubernetes.network import network_policy
from asyncrpc.clusters.manifest.kubernetes.pod import (
    Object,
    labels,
    metadata,
    pod_template,
)
from asyncrpc.clusters.manifest.kubernetes.workload import ProbeKind, Workload
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
