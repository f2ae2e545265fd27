"""The kinds of workload, each with the function that makes its objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from asyncrpc.clusters.manifest.kubernetes.job import indexed_job
from asyncrpc.clusters.manifest.kubernetes.jobset import job_set
from asyncrpc.clusters.manifest.kubernetes.leader_worker_set import leader_worker_set
from asyncrpc.clusters.manifest.kubernetes.pod import Object
from asyncrpc.clusters.manifest.kubernetes.ray_job import ray_job
from asyncrpc.clusters.manifest.kubernetes.train_job import train_job
from asyncrpc.clusters.manifest.kubernetes.workload import Workload

KINDS: Final[Mapping[str, Callable[[Workload], list[Object]]]] = {
    "job": indexed_job,
    "jobset": job_set,
    "lws": leader_worker_set,
    "trainjob": train_job,
    "ray": ray_job,
}
