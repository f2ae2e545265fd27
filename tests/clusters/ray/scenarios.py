"""What happens on a real Ray cluster.  Each is a coroutine that asserts."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final, TypeAlias

import pytest
import ray
import torch
from torch import nn

import asyncrpc.ray
from asyncrpc import Cluster, DeviceOptions, Options, RayOptions, RestartLimits
from asyncrpc.errors import (
    ClusterError,
    Outcome,
    OwnerLostError,
    UsageError,
    WorkerLostError,
    WorkerStartError,
)
from tests.clusters.ray import functions
from tests.clusters.ray.session import Nodes

Scenario: TypeAlias = Callable[[Nodes], Coroutine[Any, Any, None]]

ONE: Final = {"CPU": 1.0}
SOON: Final = RestartLimits(restarts_max=3, backoff_s=0.01)
TOGETHER: Final = RestartLimits(restarts_max=3, backoff_s=0.01, together=True)
PATIENT_S: Final = 300.0


class Scenarios(dict[str, Scenario]):
    """Scenarios by name, each of which a test plays."""

    def add(self, function: Scenario) -> Scenario:
        """Let a test play it."""
        self[function.__name__] = function
        return function


SCENARIOS: Final = Scenarios()
scenario: Final = SCENARIOS.add


async def placement_groups() -> list[str]:
    table = await asyncio.to_thread(ray.util.placement_group_table)
    return [row["state"] for row in table.values() if row["state"] != "REMOVED"]


async def node_of_bundle(index: int) -> str:
    """Return the node that has a bundle of the placement group that is there."""
    table = await asyncio.to_thread(ray.util.placement_group_table)
    (group,) = [row for row in table.values() if row["state"] != "REMOVED"]
    node_id: str = group["bundles_to_node_id"][index]
    return node_id


def on(bundles: list[dict[str, float]], each: int = 1, **settings: Any) -> Cluster:
    return Cluster.ray(bundles, each, start_timeout_s=PATIENT_S, **settings)


@scenario
async def cluster_starts_calls_grows_and_shrinks(_: Nodes) -> None:
    async with on([ONE] * 2, 2) as cluster:
        assert cluster.names == ["w0", "w1", "w2", "w3"]
        pids = [await peer.call(os.getpid) for peer in cluster.peers]
        assert len({os.getpid(), *pids}) == 5
        assert await cluster["w0"].call(functions.pid_of, "w3") == pids[3]
        await cluster.resize(5)
        await cluster.stop("w0", "w2")
        await cluster.restart("w1")
        assert cluster.names == ["w1", "w3", "w4"]
        assert await cluster["w1"].call(os.getpid) not in pids


@scenario
async def lost_worker_of_a_cluster_starts_again(_: Nodes) -> None:
    async with on([ONE], restart=SOON) as cluster:
        pid, changes = await cluster["w0"].call(os.getpid), cluster.changes()
        os.kill(pid, signal.SIGKILL)
        assert (await anext(changes)).kind == "lost"
        assert (await anext(changes)).kind == "ready"
        assert await cluster["w0"].call(os.getpid) != pid


@scenario
async def workers_of_a_lost_node_are_lost_and_the_others_go_on(nodes: Nodes) -> None:
    with nodes.one_more(here=1.0) as node:
        bundles = [ONE, {**ONE, "here": 1.0}]
        apart = RayOptions(strategy="STRICT_SPREAD")
        async with on(bundles, ray=apart) as cluster:
            changes = cluster.changes()
            nodes.remove(node)
            change = await anext(changes)
            assert (change.kind, change.worker) == ("failed", "w1")
            assert await cluster["w0"].call(len, "abc") == 3


@scenario
async def bundles_of_a_cluster_that_do_not_fit_are_named(_: Nodes) -> None:
    soon = RayOptions(placement_timeout_s=1.0)
    for _again in range(2):
        with pytest.raises(ClusterError, match=r"large enough for bundle 0 \(CPU=64\)"):
            await Cluster.ray([{"CPU": 64}], ray=soon).__aenter__()


@scenario
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


@scenario
async def loss_of_one_restarts_all_together(_: Nodes) -> None:
    """References to values of former lives fail by name; calls wait for the next."""
    async with on([ONE] * 2, restart=TOGETHER) as cluster:
        pids = [await peer.call(os.getpid) for peer in cluster.peers]
        reference = cluster["w0"].remote(torch.ones, 3)
        await reference.to_here()
        in_flight = asyncio.ensure_future(cluster["w1"].call(functions.forever))
        await cluster["w1"].call(os.getpid)
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(WorkerLostError) as cut:
            await in_flight
        assert cut.value.outcome is Outcome.UNKNOWN
        await cluster.ready()
        again = [await peer.call(os.getpid) for peer in cluster.peers]
        assert len({*pids, *again}) == 4
        assert await cluster["w0"].call(functions.pid_of, "w1") == again[1]
        with pytest.raises(OwnerLostError, match="w0"):
            await reference.to_here()


@scenario
async def workers_of_a_lost_node_start_again_on_its_successor(nodes: Nodes) -> None:
    """The bundle waits until there is a node for it again, and the cluster with it."""
    bundles = [ONE, {**ONE, "spare": 1.0}]
    apart = RayOptions(strategy="STRICT_SPREAD")
    with nodes.one_more(spare=1) as first:
        async with on(bundles, ray=apart, restart=TOGETHER) as cluster:
            pids = [await peer.call(os.getpid) for peer in cluster.peers]
            changes = cluster.changes()
            nodes.remove(first)
            lost = await anext(changes)
            assert (lost.kind, lost.worker) == ("lost", "w1")
            with nodes.one_more(spare=1) as second:
                await cluster.ready()
                again = [await peer.call(os.getpid) for peer in cluster.peers]
                assert len({*pids, *again}) == 4
                assert await node_of_bundle(1) == second.node_id
                assert await cluster["w0"].call(functions.pid_of, "w1") == again[1]


@scenario
async def nothing_is_left_of_a_block_that_raises(_: Nodes) -> None:
    with pytest.raises(ZeroDivisionError):
        async with on([ONE]) as cluster:
            await cluster["w0"].call(divmod, 1, 0)
    assert await placement_groups() == []


@scenario
async def nothing_is_left_of_a_start_that_is_cancelled(_: Nodes) -> None:
    task = asyncio.create_task(on([ONE] * 2).__aenter__())
    while not await placement_groups():  # noqa: ASYNC110  (Ray tells no event)
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await placement_groups() == []


@scenario
async def worker_that_cannot_start_is_an_error(_: Nodes) -> None:
    without = Options(devices=DeviceOptions(names=("cuda",)))
    with pytest.raises(WorkerStartError, match=r"'w0' did not start: .*cuda"):
        await on([ONE], options=without).__aenter__()
    wrong = RayOptions(runtime_env={"env_vars": {"RAY_TEST": 7}})  # must be text
    with pytest.raises((ClusterError, UsageError, TypeError), match="env_vars"):
        await on([ONE], ray=wrong).__aenter__()
    assert await placement_groups() == []


@scenario
async def each_cluster_has_a_secret_that_is_not_shown(_: Nodes) -> None:
    secrets = set[bytes]()
    for _again in range(2):
        async with on([ONE]) as cluster:
            secret = cluster.worker.options.secret_bytes
            assert secret is not None
            secrets.add(secret)
            process = Path(f"/proc/{await cluster['w0'].call(os.getpid)}")
            for file in ("environ", "cmdline"):
                assert secret not in (process / file).read_bytes()
            assert secret.decode() not in repr([cluster, cluster.worker.options])
    assert len(secrets) == 2


@scenario
async def stored_tensor_is_the_same_memory_in_all_processes_of_a_node(
    _: Nodes,
) -> None:
    """A reference comes by asyncrpc; workers are drivers of Ray of their own."""
    together = RayOptions(strategy="STRICT_PACK")
    async with on([ONE], 2, ray=together) as cluster:
        nodes = [await peer.call(functions.join_ray) for peer in cluster.peers]
        assert nodes[0] == nodes[1]
        stored = await cluster["w0"].call(functions.stored_ones)
        seen = [await peer.call(functions.memory_of, stored) for peer in cluster.peers]
        assert [total for total, _ in seen] == [1 << 20] * 2
        assert seen[0][1] == seen[1][1] != ""
        assert (await asyncrpc.ray.get(stored)).sum() == 1 << 20


@scenario
async def value_of_this_driver_is_read_in_place(_: Nodes) -> None:
    stored = await asyncrpc.ray.put(torch.ones(1 << 20))
    here = await asyncrpc.ray.get(stored)
    again = await asyncrpc.ray.get(stored.ref)
    assert here.data_ptr() == again.data_ptr()
    assert functions.mapping_at(here.data_ptr())
    own = await asyncrpc.ray.get(stored, copy=True)
    assert not functions.mapping_at(own.data_ptr())
    own.zero_()
    assert here.sum() == 1 << 20


@scenario
async def stored_tensor_stays_while_a_tensor_uses_it(_: Nodes) -> None:
    kept = await asyncrpc.ray.get(await asyncrpc.ray.put(torch.ones(1 << 20)))
    for _number in range(5):  # more than fits: what nothing refers to makes room
        await asyncrpc.ray.put(torch.zeros(10 << 20))
    assert kept.sum() == 1 << 20


@scenario
async def every_kind_of_value_comes_back_as_it_was(_: Nodes) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.rand(3, 4, generator=generator).to(dtype)
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int8)
    ]
    tensors += [
        torch.rand(3, 4, generator=generator).T,
        torch.tensor(2.5),
        torch.empty(0, 3),
        torch.tensor([True, False]),
        torch.rand(4, dtype=torch.complex64, generator=generator).conj(),
        nn.Parameter(torch.ones(2)),
    ]
    value = {"tensors": tensors, "pair": (tensors[0], 7), "text": "as Ray has it"}
    fetched = await asyncrpc.ray.get(await asyncrpc.ray.put(value))
    assert fetched.keys() == value.keys()
    for before, after in zip(tensors, fetched["tensors"], strict=True):
        assert after.dtype == before.dtype
        assert after.shape == before.shape
        assert torch.equal(after, before.detach().resolve_conj())
    assert fetched["pair"][1] == 7
    assert fetched["text"] == "as Ray has it"


@scenario
async def no_placement_group_is_left(_: Nodes) -> None:
    """Wait until Ray has cleaned up after a driver that died."""
    while await placement_groups():  # noqa: ASYNC110  (Ray tells no event)
        await asyncio.sleep(0.05)
