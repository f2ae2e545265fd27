"""An indexed Job: each pod has an index, which is the rank, and a name that stays.

A pod that fails is replaced by one with the same index and name, and another address;
the others go on.  The old one must be gone first, or two workers had one name.

Source: Kubernetes, "Jobs", sections "Completion mode", "Pod failure policy", "Backoff
limit per index" and "Pod replacement policy".
"""

from __future__ import annotations

from typing import Final

from asyncrpc.cli.manifest.kubernetes.network import headless_service, network_policy
from asyncrpc.cli.manifest.kubernetes.pod import (
    CONTAINER,
    Object,
    metadata,
    pod_template,
    variable,
)
from asyncrpc.cli.manifest.kubernetes.workload import Workload

PREEMPTED: Final = 75  # EX_TEMPFAIL: the exit code of asyncrpc.Preemption


def indexed_job(workload: Workload) -> list[Object]:
    """Return the objects of an indexed Job.

    Raises:
        UsageError: the name is too long for the names of the pods.
    """
    workload.check_pod_names()
    # The name of pod 0 is found by the resolver's search list: it needs no namespace.
    spec = job_spec(workload, f"{workload.name}-0.{workload.name}")
    spec["template"]["spec"]["subdomain"] = workload.name
    spec["backoffLimitPerIndex"] = workload.restarts
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata(workload),
        "spec": spec,
    }
    return [headless_service(workload), network_policy(workload), job]


def job_spec(workload: Workload, meeting_point: str, *further: Object) -> Object:
    """Return the specification of an indexed Job.

    Args:
        workload: the program.
        meeting_point: name of pod 0 in the DNS.
        *further: variables.
    """
    variables = [
        variable("WORLD_SIZE", str(workload.workers)),
        variable("MASTER_ADDR", meeting_point),
        variable("MASTER_PORT", str(workload.port)),
        *further,
    ]
    return {
        "completionMode": "Indexed",
        "completions": workload.workers,
        "parallelism": workload.workers,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": _failure_rules()},
        "template": pod_template(workload, variables, restart_policy="Never"),
    }


def _failure_rules() -> list[Object]:
    """Return what is no failure: a pod that was moved, or ended itself in order."""
    moved = {"type": "DisruptionTarget", "status": "True"}
    ended = {"containerName": CONTAINER, "operator": "In", "values": [PREEMPTED]}
    return [
        {"action": "Ignore", "onPodConditions": [moved]},
        {"action": "Ignore", "onExitCodes": ended},
    ]
