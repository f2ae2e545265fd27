"""What happens to a `Cluster` in bundles of Ray, on a real cluster."""

from __future__ import annotations

import os
import signal
from typing import Any, Final

import pytest
import ray

from asyncrpc import Cluster, RayOptions
from asyncrpc.errors import ClusterError, UsageError
from tests.clusters.ray import functions
from tests.clusters.ray.scenarios import ONE, SOON, Scenarios
from tests.clusters.ray.session import Nodes

PATIENT_S: Final = 300.0
GROUNDS: Final = Scenarios()
ground: Final = GROUNDS.add


@ground
async def cluster_starts_calls_grows_and_shrinks(_: Nodes) -> None:
    async with Cluster.ray([ONE] * 2, 2, start_timeout_s=PATIENT_S) as cluster:
        assert cluster.names == ["w0", "w1", "w2", "w3"]
        pids = [await peer.call(functions.pid) for peer in cluster.peers]
        assert len({os.getpid(), *pids}) == 5
        assert await cluster["w0"].call(functions.pid_of, "w3") == pids[3]
        await cluster.resize(5)
        await cluster.stop("w0", "w2")
        await cluster.restart("w1")
        assert cluster.names == ["w1", "w3", "w4"]
        assert await cluster["w1"].call(functions.pid) not in pids


@ground
async def lost_worker_of_a_cluster_starts_again(_: Nodes) -> None:
    limits, start_s = SOON, PATIENT_S
    async with Cluster.ray([ONE], restart=limits, start_timeout_s=start_s) as cluster:
        pid, changes = await cluster["w0"].call(functions.pid), cluster.changes()
        os.kill(pid, signal.SIGKILL)
        assert (await anext(changes)).kind == "lost"
        assert (await anext(changes)).kind == "ready"
        assert await cluster["w0"].call(functions.pid) != pid


@ground
async def workers_of_a_lost_node_are_lost_and_the_others_go_on(nodes: Nodes) -> None:
    with nodes.one_more(here=1.0) as node:
        bundles: list[dict[str, float]] = [{**ONE}, {**ONE, "here": 1.0}]
        apart = RayOptions(strategy="STRICT_SPREAD")
        async with Cluster.ray(
            bundles, ray=apart, start_timeout_s=PATIENT_S
        ) as cluster:
            changes = cluster.changes()
            nodes.remove(node)
            change = await anext(changes)
            assert (change.kind, change.worker) == ("failed", "w1")
            assert await cluster["w0"].call(len, "abc") == 3


@ground
async def bundles_of_a_cluster_that_do_not_fit_are_named(_: Nodes) -> None:
    soon = RayOptions(placement_timeout_s=1.0)
    for _again in range(2):
        with pytest.raises(ClusterError, match=r"large enough for bundle 0 \(CPU=64\)"):
            await Cluster.ray([{"CPU": 64}], ray=soon).__aenter__()


@ground
async def wrong_clusters_on_ray_are_refused(_: Nodes) -> None:
    wrong: list[Any] = [None, 4, [], [{}], [{"CPU": 0}], [{"CPU": "x"}], ["CPU"]]
    for bundles in wrong:
        with pytest.raises(UsageError, match="bundle"):
            Cluster.ray(bundles)
    with pytest.raises(UsageError, match="keep=True is not for"):
        Cluster.ray([ONE], keep=True)
    with pytest.raises(UsageError, match="a RayOptions"):
        Cluster.ray([ONE], ray={"strategy": "PACK"})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"RayOptions\.strategy"):
        RayOptions(strategy="NEAR")
    assert ray.is_initialized()
