"""Actors on the workers of a cluster: in real processes, some of which are lost."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any, Final

import pytest

import asyncrpc
from asyncrpc import Actor, Cluster, ClusterChange, RestartLimits
from asyncrpc.errors import (
    ClusterError,
    DeadlineExceededError,
    NotStartedError,
    OwnerLostError,
    UsageError,
    WorkerLostError,
)
from tests.integration.clusters.actor_classes import Counter, add_by

QUICKLY: Final = RestartLimits(restarts_max=2, backoff_s=0.01)


async def kill(cluster: Cluster, actor: Actor[Any], until: str) -> None:
    """Kill the process of an actor; return at the change that follows."""
    changes = cluster.changes()
    os.kill(await actor.method(Counter.pid)(), signal.SIGKILL)
    await change_to(changes, until)


async def change_to(changes: AsyncIterator[ClusterChange], kind: str) -> None:
    async for change in changes:
        if change.kind == kind:
            return
    raise AssertionError(f"no change was {kind!r}")


async def test_actors_are_placed_on_workers() -> None:
    async with Cluster(2) as cluster:
        everywhere = await cluster.spawn(Counter, 1)
        assert [actor.worker for actor in everywhere] == ["w0", "w1"]
        assert await everywhere.add(2) == [3, 3]
        assert len({*await everywhere.pid(), os.getpid()}) == 3
        pairs = await cluster.spawn(Counter, n=2, per_worker=2)
        assert [actor.worker for actor in pairs] == ["w0", "w0", "w1", "w1"]
        assert await pairs.add(asyncrpc.scatter(range(4))) == [2, 3, 4, 5]
        some = await cluster.spawn(Counter, on=["w1", cluster["w0"]])
        assert [actor.worker for actor in some] == ["w1", "w0"]
        assert await cluster["w0"].call(add_by, some[0], 4) == 4


async def test_calls_of_a_lost_actor_fail_by_name() -> None:
    async with Cluster(2, restart=QUICKLY) as cluster:
        counters = await cluster.spawn(Counter)
        with pytest.raises(WorkerLostError) as caught:
            await counters[1].leave()
        assert caught.value.function == "Counter[1].leave"
        await change_to(cluster.changes(), "ready")
        for use in (counters[1].add(1), counters[1].save(), anext(counters[1].rows(1))):
            with pytest.raises(OwnerLostError, match="'w1'") as lost:
                await use
            assert "Actor Counter[1] is lost with it: spawn it again" in str(lost.value)
        errors = [reply.error async for reply in counters.add.as_completed(1)]
        assert sorted(error is None for error in errors) == [False, True]
        assert await counters[0].add(1) == 2


async def test_lost_actor_is_made_again_where_asked() -> None:
    async with Cluster(1, restart=QUICKLY) as cluster:
        (counter,) = counters = await cluster.spawn(Counter, 5, remake=True)
        state = await counter.save()
        assert await counter.add(1) == 6
        first = counter.rref
        await kill(cluster, counter, until="lost")
        # All calls wait for the worker; the actor is made once.
        replies = await asyncio.gather(*(counter.add(1) for _ in range(3)))
        assert sorted(replies) == [6, 7, 8]
        assert counter.rref is not first
        await counters.load([state])
        assert await counters.add(0) == [5]
        await kill(cluster, counter, until="ready")
        assert [row async for row in counter.rows(2)] == [5, 6]
        await kill(cluster, counter, until="failed")
        with pytest.raises(ClusterError, match="'w0' does not run: its process was"):
            await counter.add(1)
        await cluster.restart("w0")
        assert await counter.add(1) == 6


async def test_call_that_waits_for_a_lost_actor_has_a_limit() -> None:
    slowly = RestartLimits(backoff_s=3600.0, backoff_max_s=3600.0)
    options = asyncrpc.Options(rpc_timeout_s=30.0)
    async with Cluster(1, restart=slowly, options=options) as cluster:
        (counter,) = await cluster.spawn(Counter, remake=True)
        await kill(cluster, counter, until="lost")
        with pytest.raises(TimeoutError):
            async with asyncrpc.deadline(0.01):
                await counter.add(1)
        waiting = asyncio.create_task(counter.add(1))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        waiting = asyncio.create_task(counter.add(1))
        await cluster.stop("w0")
        with pytest.raises(ClusterError, match="'w0' does not run"):
            await waiting


async def test_default_timeout_limits_the_wait_for_a_lost_actor() -> None:
    slowly = RestartLimits(backoff_s=3600.0, backoff_max_s=3600.0)
    options = asyncrpc.Options(rpc_timeout_s=0.5)
    async with Cluster(1, restart=slowly, options=options) as cluster:
        (counter,) = await cluster.spawn(Counter, remake=True)
        await kill(cluster, counter, until="lost")
        with pytest.raises(
            DeadlineExceededError, match=r"Counter\[0\]\.(__init__|add) on"
        ):
            await counter.add(1)


async def test_constructor_that_fails_on_one_worker_undoes_all() -> None:
    async with Cluster(3) as cluster:
        with pytest.raises(ValueError, match="cannot count on w1") as caught:
            await cluster.spawn(Counter, fails_on="w1", per_worker=2)
        assert "in __init__" in caught.value.remote_traceback  # type: ignore[attr-defined]
        assert not cluster.worker.rrefs()


async def test_wrong_uses_of_spawn_are_refused() -> None:
    cluster = Cluster(1)
    with pytest.raises(NotStartedError, match="must be entered first"):
        await cluster.spawn(Counter)
    async with cluster:
        wrong: list[Any] = [add_by, Counter.add, "Counter", None, 3]
        for value in wrong:
            with pytest.raises(UsageError, match="cls must be a class"):
                await cluster.spawn(value)
        for per_worker in (0, -1, 1.5, None, 2**70):
            with pytest.raises(UsageError, match="per_worker must be"):
                await cluster.spawn(Counter, per_worker=per_worker)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="remake must be"):
            await cluster.spawn(Counter, remake="yes")  # type: ignore[arg-type]
        for on in ("w0", 3, {"w0": 1}):
            with pytest.raises(UsageError, match="on must be a list of names or peers"):
                await cluster.spawn(Counter, on=on)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=r"a worker of the cluster \('w0'\)"):
            await cluster.spawn(Counter, on=["w7"])
        with pytest.raises(UsageError, match="each of on must be a name or a Peer"):
            await cluster.spawn(Counter, on=[3])  # type: ignore[list-item]
        with pytest.raises(UsageError, match="on must be at least one worker"):
            await cluster.spawn(Counter, on=[])
        with pytest.raises(UsageError, match="scatter has 2 values for 1 actors"):
            await cluster.spawn(Counter, asyncrpc.scatter([1, 2]))
        with pytest.raises(TypeError):
            await cluster.spawn(Counter, often=3)
        with pytest.raises(UsageError, match="was started on"):
            await asyncio.to_thread(lambda: asyncio.run(cluster.spawn(Counter)))
        counters = await cluster.spawn(Counter)
        await cluster.stop("w0")
        with pytest.raises(ClusterError, match="'w0' does not run"):
            await cluster.spawn(Counter, on=["w0"])
        with pytest.raises(UsageError, match="at least one worker that runs"):
            await cluster.spawn(Counter)
        with pytest.raises(OwnerLostError, match=r"Counter\[0\] is lost"):
            await counters.add(1)
    with pytest.raises(NotStartedError, match="has ended"):
        await cluster.spawn(Counter)
    with pytest.raises(OwnerLostError):
        await counters.add(1)


async def test_cancelled_spawn_leaves_nothing() -> None:
    async with Cluster(2) as cluster:
        spawning = asyncio.create_task(cluster.spawn(Counter, per_worker=2))
        await asyncio.sleep(0)
        spawning.cancel()
        with pytest.raises(asyncio.CancelledError):
            await spawning
        assert not cluster.worker.rrefs()
