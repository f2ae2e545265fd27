"""What the controllers of Kubernetes make of a manifest: pods, names, variables.

Only what a program can notice is here: the names in the DNS, the variables that a
controller adds, whether names are published before pods are ready.

Source: Kubernetes, "Jobs" and "DNS for Services and Pods"; the sources that
asyncrpc.clusters.manifest.kubernetes names for each kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from uuid import uuid4

Object = dict[str, Any]

NAMESPACE: Final = "research"
DOMAIN: Final = f"{NAMESPACE}.svc.cluster.local"


@dataclass(frozen=True, slots=True)
class PodPlan:
    """A pod that a controller is to start."""

    hostname: str  # which stays when the pod is replaced
    subdomain: str  # the headless Service that names it
    spec: Object  # of the pod
    variables: Mapping[str, str]  # those of the manifest, and what the controller adds
    publishes_unready: bool  # whether its name is in the DNS before it is ready

    @property
    def container(self) -> Object:
        (container,) = self.spec["containers"]
        return dict(container)

    @property
    def full_name(self) -> str:
        return f"{self.hostname}.{self.subdomain}.{DOMAIN}"


def plans(objects: list[Object], attempt: int = 0) -> list[PodPlan]:
    """Return the pods of a manifest, in the order of their indices."""
    by_kind = {resource["kind"]: resource for resource in objects}
    (kind,) = by_kind.keys() & CONTROLLERS.keys()
    return CONTROLLERS[kind](by_kind, attempt)


def _job(by_kind: Mapping[str, Object], _: int) -> list[PodPlan]:
    job, service = by_kind["Job"], by_kind["Service"]
    name, spec = job["metadata"]["name"], job["spec"]
    template = spec["template"]
    selector = service["spec"]["selector"].items()
    assert template["spec"]["subdomain"] == service["metadata"]["name"]
    assert selector <= template["metadata"]["labels"].items()
    publishes = service["spec"].get("publishNotReadyAddresses", False)
    # The controller labels the pods of each Job that is made with an id of its own.
    fields = {"metadata.labels['batch.kubernetes.io/controller-uid']": str(uuid4())}
    return [
        _plan(
            f"{name}-{index}",
            name,
            template,
            _indexed(index),
            fields=fields,
            publishes=publishes,
        )
        for index in range(spec["completions"])
    ]


def _job_set(by_kind: Mapping[str, Object], attempt: int) -> list[PodPlan]:
    job_set = by_kind["JobSet"]
    return _of_jobs(job_set["metadata"]["name"], job_set["spec"], {}, attempt)


def _train_job(by_kind: Mapping[str, Object], attempt: int) -> list[PodPlan]:
    run, runtime = by_kind["TrainJob"], by_kind["TrainingRuntime"]
    name, nodes = run["metadata"]["name"], run["spec"]["trainer"]["numNodes"]
    assert run["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    spec = runtime["spec"]["template"]["spec"]
    for job in spec["replicatedJobs"]:
        job["template"]["spec"]["completions"] = nodes
    variables = {
        "PET_NNODES": str(nodes),
        "PET_NPROC_PER_NODE": str(
            runtime["spec"]["mlPolicy"]["torch"]["numProcPerNode"]
        ),
        "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
        "PET_MASTER_PORT": "29500",
    }
    pods = _of_jobs(name, spec, variables, attempt)
    for index, pod in enumerate(pods):
        assert isinstance(pod.variables, dict)
        pod.variables["PET_NODE_RANK"] = str(index)
    return pods


def _of_jobs(
    name: str, spec: Object, more: Mapping[str, str], attempt: int
) -> list[PodPlan]:
    (job,) = spec["replicatedJobs"]
    annotation = "jobset.sigs.k8s.io/restart-attempt"
    fields = {f"metadata.annotations['{annotation}']": str(attempt)}
    network = spec["network"]
    assert network["enableDNSHostnames"]
    return [
        _plan(
            f"{name}-{job['name']}-0-{index}",
            network.get("subdomain", name),
            job["template"]["spec"]["template"],
            {**_indexed(index), **more},
            fields=fields,
            publishes=network["publishNotReadyAddresses"],
        )
        for index in range(job["template"]["spec"]["completions"])
    ]


def _leader_worker_set(by_kind: Mapping[str, Object], _: int) -> list[PodPlan]:
    worker_set = by_kind["LeaderWorkerSet"]
    name = worker_set["metadata"]["name"]
    group = worker_set["spec"]["leaderWorkerTemplate"]
    return [
        _plan(
            f"{name}-0-{index}" if index else f"{name}-0",
            name,
            group["workerTemplate"],
            {
                "LWS_LEADER_ADDRESS": f"{name}-0.{name}.{NAMESPACE}",
                "LWS_GROUP_SIZE": str(group["size"]),
                "LWS_WORKER_INDEX": str(index),
            },
            fields={},
            publishes=True,
        )
        for index in range(group["size"])
    ]


Controller = Callable[[Mapping[str, Object], int], list[PodPlan]]
CONTROLLERS: Final[Mapping[str, Controller]] = {
    "Job": _job,
    "JobSet": _job_set,
    "TrainJob": _train_job,
    "LeaderWorkerSet": _leader_worker_set,
}


def _indexed(index: int) -> dict[str, str]:
    return {"JOB_COMPLETION_INDEX": str(index)}


def _plan(
    hostname: str,
    subdomain: str,
    template: Object,
    added: Mapping[str, str],
    *,
    fields: Mapping[str, str],
    publishes: bool,
) -> PodPlan:
    (container,) = template["spec"]["containers"]
    values = {
        entry["name"]: entry["value"] for entry in container["env"] if "value" in entry
    }
    # Kubernetes replaces $(NAME), and takes two dollars for one.
    plain = {name: text.replace("$$(", "$(") for name, text in values.items()}
    # What the downward API tells of the pod; an unknown field keeps it from starting.
    asked = {entry["name"]: entry for entry in container["env"] if "valueFrom" in entry}
    pod_values = {
        name: fields[entry["valueFrom"]["fieldRef"]["fieldPath"]]
        for name, entry in asked.items()
    }
    variables = {**plain, **pod_values, **added}
    return PodPlan(hostname, subdomain, template["spec"], variables, publishes)
