"""What happens to a gang, on a real cluster.  Each is a coroutine that asserts."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeAlias

import pytest
import ray

import asyncrpc
from asyncrpc.errors import (
    NotStartedError,
    Outcome,
    OwnerLostError,
    WorkerLostError,
)
from asyncrpc.ray import Gang, RestartLimits
from tests.clusters.ray import functions
from tests.clusters.ray.session import Nodes

Scenario: TypeAlias = Callable[[Nodes], Coroutine[Any, Any, None]]

ONE: Final = {"CPU": 1}
SOON: Final = RestartLimits(backoff_s=0.01)


SCENARIOS: Final[dict[str, Scenario]] = {}


def scenario(function: Scenario) -> Scenario:
    """Let a test play it."""
    SCENARIOS[function.__name__] = function
    return function


async def placement_groups() -> list[str]:
    table = await asyncio.to_thread(ray.util.placement_group_table)
    return [one["state"] for one in table.values() if one["state"] != "REMOVED"]


async def until_dead(handle: Any) -> None:
    """Wait until Ray says that an actor is dead."""
    while True:
        try:
            await handle.run.remote(nothing)
        except ray.exceptions.RayActorError:
            return
        except ray.exceptions.RayTaskError:
            pass  # its worker has been stopped; the process ends


async def nothing(worker: asyncrpc.Worker) -> None:
    """Do nothing."""


@scenario
async def workers_are_called_as_always(_: Nodes) -> None:
    """From the driver and from each other; with ranks, barriers and references."""
    async with Gang([ONE] * 3, name="g") as gang:
        assert gang.generation == 1
        assert [one.name for one in gang.peers] == ["g-0", "g-1", "g-2"]
        pids = [await peer.call(functions.pid) for peer in gang.peers]
        assert pids == [one.pid for one in gang.workers]
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
        assert pids == [one.pid for one in gang.workers]
        await asyncio.gather(
            *(peer.call(functions.members_after_barrier) for peer in gang.peers)
        )
        with pytest.raises(OwnerLostError, match="g-0"):
            await reference.to_here()
