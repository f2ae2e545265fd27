"""What happens to a gang, on a real cluster.  Each is a coroutine that asserts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final, TypeAlias

import pytest
import ray
import torch
from torch import nn

import asyncrpc
import asyncrpc.ray
from asyncrpc.clusters.ray.actor import WorkerOrder
from asyncrpc.errors import (
    GangError,
    GangLostError,
    GangPlacementError,
    NotStartedError,
    Outcome,
    OwnerLostError,
    RejectedError,
    UsageError,
    WorkerLostError,
)
from asyncrpc.ray import Gang, RestartLimits, StoredValue
from tests.clusters.ray import functions
from tests.clusters.ray.session import Nodes

Scenario: TypeAlias = Callable[[Nodes], Coroutine[Any, Any, None]]

ONE: Final = {"CPU": 1}
SOON: Final = RestartLimits(backoff_s=0.01)


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


async def until_dead(handle: Any) -> None:
    while True:
        try:
            await handle.run.remote(nothing)
        except ray.exceptions.RayActorError:
            return
        except ray.exceptions.RayTaskError:
            pass  # its worker has been stopped; the process ends


async def until_refused(peer: asyncrpc.Peer) -> None:
    """Call a worker again and again until a call raises."""
    while True:
        await peer.call(functions.pid)


async def nothing(worker: asyncrpc.Worker) -> None:
    """Do nothing."""


@scenario
async def workers_are_called_as_always(_: Nodes) -> None:
    """From the driver and from each other; with ranks, barriers and references."""
    async with Gang([ONE] * 3, name="g") as gang:
        assert gang.generation == 1
        assert [peer.name for peer in gang.peers] == ["g-0", "g-1", "g-2"]
        pids = [await peer.call(functions.pid) for peer in gang.peers]
        assert pids == [worker.pid for worker in gang.workers]
        assert len({os.getpid(), *pids}) == 4
        assert await gang.peer(0).call(functions.pid_of, "g-2") == pids[2]
        known = await asyncio.gather(
            *(peer.call(functions.members_after_barrier) for peer in gang.peers)
        )
        assert known == [["g-0", "g-1", "g-2", "g-driver"]] * 3
        reference = gang.peer(1).remote(functions.ones)
        assert (await reference.to_here()).sum() == 3
        assert await placement_groups() == ["CREATED"]
        handles = gang.actors
    assert await placement_groups() == []
    for handle in handles:
        await until_dead(handle)
    with pytest.raises(NotStartedError):
        await gang.changed()


@scenario
async def a_killed_worker_restarts_the_gang(_: Nodes) -> None:
    """References fail by name; calls meanwhile say that nothing ran."""
    async with Gang([ONE] * 2, name="g", limits=SOON) as gang:
        before = gang.workers
        reference = gang.peer(0).remote(functions.ones)
        await reference.to_here()
        in_flight = asyncio.ensure_future(gang.peer(1).call(functions.forever))
        await gang.peer(1).call(functions.pid)
        changes = gang.changes()
        os.kill(before[1].pid, signal.SIGKILL)
        lost = await anext(changes)
        assert (lost.kind, lost.generation, lost.ranks) == ("lost", 1, (1,))
        assert "g-1" in lost.why
        with pytest.raises(WorkerLostError) as refused:
            await gang.peer(1).call(functions.pid)
        assert refused.value.outcome is Outcome.NOT_EXECUTED
        with pytest.raises(WorkerLostError) as cut:
            await in_flight
        assert cut.value.outcome is Outcome.UNKNOWN
        assert await gang.changed(1) == 2
        running = await anext(changes)
        assert (running.kind, running.generation) == ("running", 2)
        assert running.ranks == (0, 1)
        for old, new in zip(before, gang.workers, strict=True):
            assert old.name == new.name
            assert old.incarnation != new.incarnation
            assert old.pid != new.pid
        pids = [await peer.call(functions.pid) for peer in gang.peers]
        assert pids == [worker.pid for worker in gang.workers]
        await asyncio.gather(
            *(peer.call(functions.members_after_barrier) for peer in gang.peers)
        )
        with pytest.raises(OwnerLostError, match="g-0"):
            await reference.to_here()


@scenario
async def a_killed_worker_restarts_alone(_: Nodes) -> None:
    """The others keep their processes, and what they refer to in each other."""
    async with Gang([ONE] * 3, name="g", restart="worker", limits=SOON) as gang:
        before = gang.workers
        kept = gang.peer(0).remote(functions.ones)
        lost = gang.peer(2).remote(functions.ones)
        await asyncio.gather(kept.to_here(), lost.to_here())
        with pytest.raises(WorkerLostError):
            await gang.peer(2).call(functions.last_words)
        assert await gang.changed(1) == 2
        after = gang.workers
        assert [member.incarnation for member in after[:2]] == [
            member.incarnation for member in before[:2]
        ]
        assert after[2].incarnation != before[2].incarnation
        assert after[2].generation == 2
        assert (await kept.to_here()).sum() == 3
        with pytest.raises(OwnerLostError, match="g-2"):
            await lost.to_here()
        assert await gang.peer(0).call(functions.pid_of, "g-2") == after[2].pid
        assert await gang.peer(2).call(functions.pid_of, "g-0") == after[0].pid
        await asyncio.gather(
            *(peer.call(functions.members_after_barrier) for peer in gang.peers)
        )


@scenario
async def an_actor_that_ray_kills_restarts_the_gang(_: Nodes) -> None:
    async with Gang([ONE] * 2, name="g", limits=SOON) as gang:
        ray.kill(gang.actors[0])
        assert await gang.changed(1) == 2
        assert [await peer.call(functions.pid) for peer in gang.peers] == [
            worker.pid for worker in gang.workers
        ]


@scenario
async def a_worker_that_shuts_itself_down_is_started_again(_: Nodes) -> None:
    """Its actor lives on, and Ray does not know."""
    async with Gang([ONE], name="g", limits=SOON) as gang:
        changes = gang.changes()
        assert len(gang.workers) == len(gang.actors) == 1
        with contextlib.suppress(WorkerLostError):  # its answer may come or not
            await gang.peer(0).call(functions.leave)
        lost = await anext(changes)
        assert (lost.kind, lost.why) == ("lost", "worker 'g-0': it shut down")
        assert gang.workers == gang.actors == []
        assert await gang.changed(1) == 2
        assert await gang.peer(0).call(functions.pid) == gang.workers[0].pid


@scenario
async def a_lost_node_is_replaced(nodes: Nodes) -> None:
    """The bundle waits until there is a node for it again, and the gang with it."""
    bundles = [ONE, {"CPU": 1, "spare": 1}]
    with nodes.one_more(spare=1) as first:
        async with Gang(
            bundles, name="g", strategy="STRICT_SPREAD", limits=SOON
        ) as gang:
            before = gang.workers
            assert before[1].node_id == first.node_id
            assert before[0].node_id != first.node_id
            changes = gang.changes()
            nodes.remove(first)
            lost = await anext(changes)
            assert (lost.kind, lost.ranks) == ("lost", (1,))
            with nodes.one_more(spare=1) as second:
                assert await gang.changed(1) == 2
                after = gang.workers
                assert after[1].node_id == second.node_id
                pid = await gang.peer(0).call(functions.pid_of, "g-1")
                assert pid == after[1].pid


@scenario
async def bundles_that_do_not_fit_are_named(_: Nodes) -> None:
    for bundles, strategy, misfits, words in (
        ([ONE, {"GPU": 1}], "PACK", (1,), "large enough for bundle 1"),
        ([{"CPU": 2}] * 3, "PACK", (2,), "not enough is free now for bundle 2"),
        ([ONE] * 3, "STRICT_SPREAD", (2,), "needs 3 nodes"),
    ):
        gang = Gang(bundles, strategy=strategy, start_timeout_s=1.0)
        with pytest.raises(GangPlacementError, match=words) as refused:
            async with gang:
                pass
        assert refused.value.bundles == misfits
    assert await placement_groups() == []


@scenario
async def nothing_is_left_of_a_block_that_raises(_: Nodes) -> None:
    handles: list[Any] = []

    async def block() -> None:
        async with Gang([ONE], name="g") as gang:
            handles.extend(gang.actors)
            await gang.peer(0).call(divmod, 1, 0)

    with pytest.raises(ZeroDivisionError):
        await block()
    await until_dead(handles[0])
    assert await placement_groups() == []


@scenario
async def nothing_is_left_of_a_block_that_is_cancelled(_: Nodes) -> None:
    handles: list[Any] = []
    inside = asyncio.Event()

    async def block() -> None:
        async with Gang([ONE], name="g") as gang:
            handles.extend(gang.actors)
            inside.set()
            await gang.peer(0).call(functions.forever)

    task = asyncio.create_task(block())
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until_dead(handles[0])
    assert await placement_groups() == []


@scenario
async def nothing_is_left_of_a_start_that_is_cancelled(_: Nodes) -> None:
    async def start() -> None:
        async with Gang([ONE] * 2, name="g"):
            pass

    task = asyncio.create_task(start())
    while not await placement_groups():  # noqa: ASYNC110  (Ray tells no event)
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await placement_groups() == []


@scenario
async def restarts_are_limited(_: Nodes) -> None:
    limits = RestartLimits(restarts_max=1, backoff_s=0.01)
    async with Gang([ONE] * 2, name="g", limits=limits) as gang:
        changes = gang.changes()
        for kinds in (["lost", "running"], ["failed"]):
            with pytest.raises(WorkerLostError):
                await gang.peer(0).call(functions.last_words)
            assert [(await anext(changes)).kind for _ in kinds] == kinds
        with pytest.raises(StopAsyncIteration):
            await anext(changes)
        with pytest.raises(GangLostError, match=r"restarts_max=1\): worker 'g-0'"):
            await gang.changed()
        with pytest.raises((WorkerLostError, RejectedError)):
            await until_refused(gang.peer(1))  # it ends now, as the gang has


@scenario
async def a_worker_that_cannot_start_is_an_error(_: Nodes) -> None:
    without = asyncrpc.Options(devices=asyncrpc.DeviceOptions(names=("cuda",)))
    with pytest.raises(GangError, match=r"'g-0': starting its actor failed: .*cuda"):
        async with Gang([ONE], name="g", options=without):
            pass
    environment = {"env_vars": {"RAY_TEST": 7}}  # must be text
    with pytest.raises((GangError, UsageError, TypeError), match="env_vars"):
        async with Gang([ONE], name="g", runtime_env=environment):
            pass
    assert await placement_groups() == []


@scenario
async def the_driver_may_have_its_own_worker(_: Nodes) -> None:
    options = asyncrpc.Options(secret="known to both of them")
    where = asyncrpc.LocalRendezvous(1)
    async with asyncrpc.Worker("me", rendezvous=where, options=options) as worker:
        async with Gang([ONE], name="g", worker=worker) as gang:
            assert gang.worker is worker
            assert await worker.peer("g-0").call(functions.pid) == gang.workers[0].pid
        assert not worker.is_closed
    with pytest.raises(NotStartedError, match="'me' must run"):
        Gang([ONE], worker=worker)


@scenario
async def a_drivers_worker_that_nobody_can_join_is_refused(_: Nodes) -> None:
    where = asyncrpc.LocalRendezvous(1)
    async with asyncrpc.Worker("me", rendezvous=where) as worker:
        with pytest.raises(UsageError, match="has no secret"):
            Gang([ONE], worker=worker)
    options = asyncrpc.Options(secret="known to both of them")
    where = asyncrpc.LocalRendezvous(1)
    async with asyncrpc.Worker(
        "me", rank=0, rendezvous=where, options=options
    ) as worker:
        with pytest.raises(UsageError, match="has rank 0"):
            Gang([ONE], worker=worker)


@scenario
async def each_gang_has_a_secret_that_is_not_shown(_: Nodes) -> None:
    secrets: list[bytes] = []
    while len(secrets) < 2:
        async with Gang([ONE], name="g") as gang:
            secret = gang.worker.options.secret_bytes
            assert secret is not None
            secrets.append(secret)
            process = Path(f"/proc/{gang.workers[0].pid}")
            for file in ("environ", "cmdline"):
                assert secret not in (process / file).read_bytes()
            shown = [gang, gang.workers, gang.worker, gang.worker.options]
            order = WorkerOrder(
                name="g",
                rank=0,
                world_size=1,
                contact=(),
                options=gang.worker.options,
                main={},
                secret=secret,
            )
            assert secret.decode() not in repr([*shown, vars(gang), order])
    assert secrets[0] != secrets[1]


async def memory_of(_: asyncrpc.Worker, stored: StoredValue) -> tuple[float, str]:
    """Return the sum of a stored tensor, and which memory it is in."""
    tensor = await asyncrpc.ray.get(stored)
    return tensor.sum().item(), mapping_at(tensor.data_ptr())


def mapping_at(address: int) -> str:
    """Return file and place of the memory at an address; empty: it is private."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        ends, _, offset, device, inode, *name = line.split()
        first, last = (int(end, 16) for end in ends.split("-"))
        if first <= address < last and name and "plasma" in name[0]:
            return f"{device} {inode} {int(offset, 16) + address - first}"
    return ""


@scenario
async def a_stored_tensor_is_the_same_memory_in_all_processes_of_a_node(
    _: Nodes,
) -> None:
    async with Gang([ONE] * 2, name="g", strategy="STRICT_PACK") as gang:
        stored = await asyncrpc.ray.put(torch.ones(1 << 20))
        seen = await asyncio.gather(
            *(handle.run.remote(memory_of, stored) for handle in gang.actors)
        )
        assert [total for total, _ in seen] == [1 << 20] * 2
        assert seen[0][1] == seen[1][1] != ""
        here = await asyncrpc.ray.get(stored)
        again = await asyncrpc.ray.get(stored.ref)
        assert here.data_ptr() == again.data_ptr()
        assert mapping_at(here.data_ptr())
        own = await asyncrpc.ray.get(stored, copy=True)
        assert not mapping_at(own.data_ptr())
        own.zero_()
        assert here.sum() == 1 << 20


@scenario
async def a_stored_tensor_stays_while_a_tensor_uses_it(_: Nodes) -> None:
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
async def a_reference_may_come_by_asyncrpc(_: Nodes) -> None:
    async with Gang([ONE] * 2, name="g") as gang:
        stored = await gang.peer(0).call(functions.stored_ones)
        assert (await asyncrpc.ray.get(stored)).sum() == 1 << 20
        assert await gang.peer(1).call(functions.sum_of, stored) == 1 << 20


@scenario
async def no_placement_group_is_left(_: Nodes) -> None:
    """Wait until Ray has cleaned up after a driver that died."""
    while await placement_groups():  # noqa: ASYNC110  (Ray tells no event)
        await asyncio.sleep(0.05)
