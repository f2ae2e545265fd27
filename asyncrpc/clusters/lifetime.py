"""Clusters without a block: what `await` has started outlasts its task.

So does the worker of `init_rpc`.  `Cluster.close` ends the cluster, or the next `await`
for the same subject: a cell of a notebook that runs again replaces what it started.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from asyncrpc.clusters.service import ClusterService, LeftRunning
from asyncrpc.core.worker import leave_running, workers_left_running
from asyncrpc.extend import host_of, service_of

if TYPE_CHECKING:
    from asyncrpc.clusters.cluster import Cluster

C = TypeVar("C", bound="Cluster")


async def start_without_block(cluster: C, subject: str | tuple[str, ...]) -> C:
    """Start a cluster that runs until it is closed; close the former of its subject."""
    for worker in workers_left_running():
        service = host_of(worker).find_service(ClusterService)
        former = None if service is None else service.left
        if former is None or former.subject != subject:
            continue
        if former.close != cluster.close:  # else to enter it again is refused
            await former.close()
    await cluster.__aenter__()
    service_of(cluster.worker, ClusterService).left = LeftRunning(
        subject, cluster.close
    )
    leave_running(cluster.worker)
    return cluster
