"""A JobSet: if one pod fails, all start again, and know the number of restarts.

A JobSet makes the headless Service itself, and publishes pods that are not ready.

Source: kubernetes-sigs/jobset, api/jobset/v1alpha2 and "Failure Policy".
"""

from __future__ import annotations

from typing import Final

from asyncrpc.clusters.manifest.kubernetes.job import (
    disruptions,
    indexed,
    meeting_variables,
)
from asyncrpc.clusters.manifest.kubernetes.network import network_policy
from asyncrpc.clusters.manifest.kubernetes.pod import (
    CONTAINER,
    Object,
    labels,
    metadata,
    pod_template,
)
from asyncrpc.clusters.manifest.kubernetes.workload import Workload

_ATTEMPT: Final = "metadata.annotations['jobset.sigs.k8s.io/restart-attempt']"
_RANDOM: Final = "-xxxxx"  # what a Job appends to the names of its pods


def job_set(workload: Workload) -> list[Object]:
    """Return the objects of a JobSet."""
    job = f"{CONTAINER}-0"
    workload.check_pod_names(f"-{job}", _RANDOM)
    host = f"{workload.name}-{job}-0.{workload.name}"
    variables = [*meeting_variables(workload, host), restart_variable()]
    template = pod_template(workload, variables, restart_policy="Never")
    spec = {**indexed(workload), **fails_at_once(CONTAINER), "template": template}
    manifest = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata(workload),
        "spec": {
            "network": network(workload),
            "failurePolicy": restarts_all(workload),
            "replicatedJobs": [
                {
                    "name": CONTAINER,
                    "replicas": 1,
                    "template": {
                        "metadata": {"labels": labels(workload)},
                        "spec": spec,
                    },
                }
            ],
        },
    }
    return [network_policy(workload), manifest]


def network(workload: Workload) -> Object:
    """Return the headless Service that a JobSet must make."""
    return {
        "enableDNSHostnames": True,
        "publishNotReadyAddresses": True,
        "subdomain": workload.name,
    }


def restart_variable() -> Object:
    """Return the variable with the number of restarts."""
    source = {"fieldRef": {"fieldPath": _ATTEMPT}}
    return {"name": "JOBSET_RESTART_ATTEMPT", "valueFrom": source}


def fails_at_once(container: str) -> Object:
    """Return the policies of a Job whose JobSet decides on the next start."""
    return {
        "backoffLimit": 0,
        "podFailurePolicy": disruptions("FailJob", container),
    }


def restarts_all(workload: Workload) -> Object:
    """Return when a JobSet restarts all pods; disruptions do not count."""
    disrupted = {
        "name": "disrupted",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    return {
        "maxRestarts": workload.restarts,
        # Pods of the last attempt have the names of the next: they must be gone.
        "restartStrategy": "BlockingRecreate",
        "rules": [disrupted],
    }
