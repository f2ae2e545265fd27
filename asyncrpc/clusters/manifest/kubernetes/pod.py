"""The pod of a worker, which is the same for all kinds of workloads.

- The program is process 1 and gets SIGTERM itself; a shell would not pass it on.
- /dev/shm is a volume: by default a container has 64 MiB.
- There is no token of a service account, and there are no variables of the namespace's
  Services: a Service named `master` would set `MASTER_PORT` to a URL.

Source: Kubernetes, "Pod Lifecycle", "Accessing the API from a Pod" and "Service".
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

from asyncrpc.clusters.manifest.kubernetes.workload import (
    SECRET_FOLDER,
    SECRET_KEY,
    ProbeKind,
    Workload,
)

Object: TypeAlias = dict[str, Any]

CONTAINER: Final = "worker"
PROBE_PORT_NAME: Final = "probe"
_PERIOD_S: Final = 10
_TIMEOUT_S: Final = 5
_SECRET_MODE: Final = 0o400  # Options.secret_file refuses what others can read
# A program, such as a compiler, may hold the interpreter for long; its peers notice a
# worker that is really stuck.
_LIVE_FAILURES: Final = 12
_START_FAILURES: Final = 60  # ten minutes for images, imports and late peers
_POLICY_FIELDS: Final = {
    "app.kubernetes.io/part-of": "asyncrpc",
    "app.kubernetes.io/managed-by": "asyncrpc",
}


def labels(workload: Workload) -> dict[str, str]:
    """Return the labels of every object."""
    return {"app.kubernetes.io/name": workload.name, **_POLICY_FIELDS}


def selector(workload: Workload) -> dict[str, str]:
    """Return the labels that the pods of the workload, and no others, have."""
    return {
        "app.kubernetes.io/name": workload.name,
        "app.kubernetes.io/part-of": "asyncrpc",
    }


def metadata(workload: Workload, name: str | None = None) -> Object:
    """Return the metadata of an object."""
    fields: Object = {"name": name or workload.name, "labels": labels(workload)}
    if workload.namespace is not None:
        fields["namespace"] = workload.namespace
    return fields


def pod_template(
    workload: Workload,
    variables: list[Object],
    *,
    restart_policy: str,
    container: str = CONTAINER,
) -> Object:
    """Return the template of a worker's pod."""
    spec: Object = {
        "restartPolicy": restart_policy,
        "terminationGracePeriodSeconds": workload.grace_s + workload.pre_stop_s,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": _pod_security(workload),
        "containers": [worker_container(workload, variables, container)],
        "volumes": volumes(workload),
    }
    return {"metadata": {"labels": labels(workload)}, "spec": spec}


def worker_container(
    workload: Workload, variables: list[Object], name: str = CONTAINER
) -> Object:
    """Return the container of a worker."""
    container: Object = {
        "name": name,
        "image": workload.image,
        "command": list(workload.command),
        "env": environment(workload, variables),
        "resources": resources(workload),
        "securityContext": _container_security(workload),
        "volumeMounts": volume_mounts(),
        **_probes(workload),
    }
    if workload.probe.kind is not ProbeKind.NONE:
        port = {"name": PROBE_PORT_NAME, "containerPort": workload.probe.port}
        container["ports"] = [port]
    if workload.pre_stop_s:
        sleep = {"sleep": {"seconds": workload.pre_stop_s}}
        container["lifecycle"] = {"preStop": sleep}
    return container


def environment(workload: Workload, variables: list[Object]) -> list[Object]:
    """Return the variables of a container."""
    user_variables = [
        variable(name, text) for name, text in workload.environment.items()
    ]
    path = f"{SECRET_FOLDER}/{SECRET_KEY}"
    return [*variables, variable("ASYNCRPC_SECRET_FILE", path), *user_variables]


def variable(name: str, text: str) -> Object:
    """Return a variable with its text."""
    # Kubernetes replaces $(NAME) in it; a second dollar makes it plain text.
    return {"name": name, "value": text.replace("$(", "$$(")}


def resources(workload: Workload) -> Object:
    """Return the resources that a container requests.

    The memory limit equals the request, so that the pod is not the first to be killed
    on a node without memory.  Cores are not limited: a limit slows bursts of the loop.
    """
    wanted, limits = {}, {}
    requested = workload.resources
    if requested.cpu is not None:
        wanted["cpu"] = requested.cpu
    if requested.memory is not None:
        wanted["memory"] = limits["memory"] = requested.memory
    if requested.gpus:
        wanted[requested.gpu_resource] = limits[requested.gpu_resource] = str(
            requested.gpus
        )
    sections = {"requests": wanted, "limits": limits}
    return {name: amounts for name, amounts in sections.items() if amounts}


def volumes(workload: Workload) -> list[Object]:
    """Return the volumes of a pod: /dev/shm and the secret."""
    memory = {"medium": "Memory", "sizeLimit": workload.resources.shared_memory}
    secret = {
        "secretName": workload.secret,
        "defaultMode": _SECRET_MODE,
        "items": [{"key": SECRET_KEY, "path": SECRET_KEY}],
    }
    return [
        {"name": "shared-memory", "emptyDir": memory},
        {"name": "secret", "secret": secret},
    ]


def volume_mounts() -> list[Object]:
    """Return the mounts of the volumes in a container."""
    return [
        {"name": "shared-memory", "mountPath": "/dev/shm"},  # noqa: S108  (a mount)
        {"name": "secret", "mountPath": SECRET_FOLDER, "readOnly": True},
    ]


def _probes(workload: Workload) -> Object:
    """Return the probes.

    A worker is not ready before it has joined the others, so they must find it before
    it is ready: the Service publishes unready pods.
    """
    times = {"periodSeconds": _PERIOD_S, "timeoutSeconds": _TIMEOUT_S}
    if workload.probe.kind is ProbeKind.HTTP:
        live = {"httpGet": {"path": "/healthz", "port": PROBE_PORT_NAME}, **times}
        ready = {"httpGet": {"path": "/readyz", "port": PROBE_PORT_NAME}, **times}
        return {
            "startupProbe": {**live, "failureThreshold": _START_FAILURES},
            "livenessProbe": {**live, "failureThreshold": _LIVE_FAILURES},
            "readinessProbe": {**ready, "failureThreshold": 1},
        }
    if workload.probe.kind is ProbeKind.TCP:
        # The system accepts connections even for a worker that is stuck, so this does
        # not show whether it lives.
        return {"readinessProbe": {"tcpSocket": {"port": PROBE_PORT_NAME}, **times}}
    return {}


def _pod_security(workload: Workload) -> Object:
    security: Object = {"seccompProfile": {"type": "RuntimeDefault"}}
    if workload.user is not None:
        # The group lets the user read the secret, which belongs to root.
        security |= {"runAsUser": workload.user, "fsGroup": workload.user}
        security["runAsNonRoot"] = workload.user != 0
    return security


def _container_security(workload: Workload) -> Object:
    security: Object = {"allowPrivilegeEscalation": False}
    if workload.user is not None:
        security["capabilities"] = {"drop": ["ALL"]}
    return security
