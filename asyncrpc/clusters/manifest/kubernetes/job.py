"""An indexed Job: each pod has an index, which is the rank, and a stable name.

A pod that fails is replaced by one with the same index and name, and another address;
the others continue.  The old pod must be gone first, or two workers would have the same
name.

Source: Kubernetes, "Jobs", sections "Completion mode", "Pod failure policy", "Backoff
limit per index" and "Pod replacement policy".
"""

from __future__ import annotations

from typing import Final

from asyncrpc.clusters.manifest.kubernetes.network import (
    headless_service,
    network_policy,
)
from asyncrpc.clusters.manifest.kubernetes.pod import (
    CONTAINER,
    Object,
    metadata,
    pod_template,
    variable,
)
from asyncrpc.clusters.manifest.kubernetes.workload import Workload
from asyncrpc.clusters.preemption.machine.preempting import EXIT_SAVED
from asyncrpc.core.environment.torchrun import RUN_VARIABLE

_JOB_UID: Final = "batch.kubernetes.io/controller-uid"


def indexed_job(workload: Workload) -> list[Object]:
    """Return the objects of an indexed Job."""
    workload.check_pod_names()
    # The name of pod 0 is found by the resolver's search list: it needs no namespace.
    host = f"{workload.name}-0.{workload.name}"
    variables = [*meeting_variables(workload, host), run_variable()]
    template = pod_template(workload, variables, restart_policy="Never")
    template["spec"]["subdomain"] = workload.name
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata(workload),
        "spec": {
            **indexed(workload),
            "backoffLimitPerIndex": workload.restarts,
            "podReplacementPolicy": "Failed",
            # An ignored failure does not count, and the pod is replaced.
            "podFailurePolicy": disruptions("Ignore", CONTAINER),
            "template": template,
        },
    }
    return [headless_service(workload), network_policy(workload), job]


def indexed(workload: Workload) -> Object:
    """Return the fields by which the pods of a Job have indices and run together."""
    return {
        "completionMode": "Indexed",
        "completions": workload.workers,
        "parallelism": workload.workers,
    }


def meeting_variables(workload: Workload, host: str) -> list[Object]:
    """Return the variables that `env://` needs besides the index."""
    return [
        variable("WORLD_SIZE", str(workload.workers)),
        variable("MASTER_ADDR", host),
        variable("MASTER_PORT", str(workload.port)),
    ]


def run_variable() -> Object:
    """Return the variable that identifies the Job among Jobs of the same name.

    By it a replaced pod tells the members of its own group from others.
    """
    source = {"fieldRef": {"fieldPath": f"metadata.labels['{_JOB_UID}']"}}
    return {"name": RUN_VARIABLE, "valueFrom": source}


def disruptions(action: str, container: str) -> Object:
    """Return a policy for pods that were moved, or that have saved and may restart."""
    moved = {"type": "DisruptionTarget", "status": "True"}
    ended = {"containerName": container, "operator": "In", "values": [EXIT_SAVED]}
    return {
        "rules": [
            {"action": action, "onPodConditions": [moved]},
            {"action": action, "onExitCodes": ended},
        ]
    }
