"""Replicas in virtual time: real workers, a simulated network, one seed a run."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, ClassVar

import pytest

import asyncrpc
from asyncrpc import Options, Outcome, RejectedError, Worker, WorkerLostError, serving
from asyncrpc.errors import OverloadedError
from asyncrpc.testing import Cluster
from asyncrpc.testing.network import Network
from tests.simulation.seeds import simulated

OPTIONS = Options(drain_timeout_s=2.0)
AT_ONCE = serving.ReplicaOptions(warm_s=0.0)
SEEDS = range(5)

here = asyncrpc.current_worker


async def whose() -> str:
    return here().name


async def work(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return here().name


@asyncrpc.idempotent
async def read(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return here().name


@asyncrpc.idempotent
async def read_unless(slow: str, seconds: float) -> str:
    """Take an hour on one replica."""
    await asyncio.sleep(3600.0 if here().name == slow else seconds)
    return here().name


async def refuse_on(busy: str) -> str:
    if here().name == busy:
        raise OverloadedError("full", retry_after_s=1.0)
    return here().name


class Runs:
    """Where a function has run; the simulation is one process."""

    names: ClassVar[list[str]] = []


async def run_and_be_refused() -> None:
    Runs.names.append(here().name)
    raise RejectedError("of something that it has called")


async def fail_on(broken: str) -> str:
    if here().name == broken:
        raise RuntimeError("broken")
    return here().name


@asynccontextmanager
async def group(
    network: Network, count: int = 3, *, announced: bool = True, **options: float
) -> AsyncIterator[tuple[Worker, list[Worker], list[serving.Replica]]]:
    """A router's worker, and replicas."""
    names = ["web", *(f"model-{number}" for number in range(count))]
    async with (
        Cluster(names=names, network=network, options=OPTIONS) as (web, *models),
        AsyncExitStack() as stack,
    ):
        replicas = []
        for model in models if announced else ():
            replica = serving.Replica(model, drain_timeout_s=0.0)
            replicas.append(await stack.enter_async_context(replica))
        yield web, models, replicas


@asynccontextmanager
async def routed(
    network: Network, count: int
) -> AsyncIterator[tuple[serving.Replicas, list[Worker], list[serving.Replica]]]:
    """A router of ready replicas, their workers, and what announces them."""
    async with (
        group(network, count) as (web, models, announced),
        serving.Replicas(web, "model-*", options=AT_ONCE) as replicas,
    ):
        await replicas.wait_ready(count)
        yield replicas, models, announced


# --- where calls go ------------------------------------------------------------------


@simulated(SEEDS)
async def test_calls_are_spread_over_replicas_with_matching_names(
    network: Network,
) -> None:
    async with routed(network, 3) as (replicas, _, _):
        calls = (replicas.call(work, 1.0) for _ in range(30))
        counts = Counter(await asyncio.gather(*calls))
        assert set(counts) == {"model-0", "model-1", "model-2"}
        assert max(counts.values()) <= 12
        statistics = replicas.statistics()
        assert [replica.state for replica in statistics.replicas] == ["READY"] * 3
        assert [replica.outstanding for replica in statistics.replicas] == [0] * 3
        assert statistics.calls == 30


@simulated(SEEDS)
async def test_load_from_other_routers_counts(network: Network) -> None:
    """What another router has there is known from the first answer on."""
    async with routed(network, 2) as (replicas, models, _):
        async with asyncio.TaskGroup() as busy:
            for _ in range(20):
                busy.create_task(models[0].peer("model-1").call(work, 0.5))
            await asyncio.sleep(0.1)
            while not any(
                replica.load > 10 for replica in replicas.statistics().replicas
            ):
                await replicas.call(whose)
            counts = Counter([await replicas.call(whose) for _ in range(20)])
        assert counts == {"model-0": 20}


@simulated(SEEDS)
async def test_key_has_one_replica_for_all_routers(network: Network) -> None:
    async with (
        group(network, 3) as (web, models, _),
        serving.Replicas(web, "model-*", options=AT_ONCE) as first,
        serving.Replicas(models[0], "model-*", options=AT_ONCE) as other,
    ):
        await first.wait_ready(3)
        await other.wait_ready(3)
        keys = [f"session {number}" for number in range(30)]
        places = [await first.using(key=key).call(whose) for key in keys]
        assert places == [await other.using(key=key).call(whose) for key in keys]
        assert set(places) == {"model-0", "model-1", "model-2"}


# --- failures ------------------------------------------------------------------------


@simulated(SEEDS)
async def test_overloaded_replica_passes_the_call_on(network: Network) -> None:
    async with routed(network, 2) as (replicas, _, _):
        replica_names = [await replicas.call(refuse_on, "model-0") for _ in range(10)]
        assert set(replica_names) == {"model-1"}
        assert replicas.statistics().ejections == 0


@simulated(SEEDS)
async def test_function_with_a_rejected_inner_call_is_not_run_twice(
    network: Network,
) -> None:
    async with routed(network, 2) as (replicas, _, _):
        Runs.names.clear()
        with pytest.raises(RejectedError, match="of something that it has called"):
            await replicas.call(run_and_be_refused)
        assert len(Runs.names) == 1


@simulated(SEEDS)
async def test_retries_end_with_their_budget(network: Network) -> None:
    """All replicas refuse: the load grows by the share that is allowed, and a few."""
    async with routed(network, 3) as (replicas, _, _):
        for _ in range(200):
            with pytest.raises(OverloadedError):
                await replicas.using(key=1).call(refuse_all)
        statistics = replicas.statistics()
        attempts = sum(replica.calls for replica in statistics.replicas)
        assert attempts == 200 + statistics.retries
        assert 40 <= statistics.retries <= 60
        assert statistics.retries_refused > 100


async def refuse_all() -> None:
    raise OverloadedError("full", retry_after_s=1.0)


@simulated(SEEDS)
async def test_replica_that_fails_each_call_is_ejected_for_a_while(
    network: Network,
) -> None:
    async with routed(network, 4) as (replicas, _, _):
        failed = 0
        for _ in range(200):
            try:
                await replicas.call(fail_on, "model-2")
            except RuntimeError:
                failed += 1
        assert failed == 5
        states = {
            replica.name: replica.state for replica in replicas.statistics().replicas
        }
        assert states["model-2"] == "EJECTED"
        await asyncio.sleep(11.0)
        counts = Counter([await replicas.call(whose) for _ in range(100)])
        assert counts["model-2"] > 5


@simulated(SEEDS)
async def test_lost_replica_fails_running_calls_unless_idempotent(
    network: Network,
) -> None:
    async with routed(network, 3) as (replicas, models, _):
        once = [asyncio.ensure_future(replicas.call(work, 5.0)) for _ in range(30)]
        may_repeat = replicas.using(idempotent=True)
        again = [asyncio.ensure_future(may_repeat.call(work, 5.0)) for _ in range(30)]
        await asyncio.sleep(1.0)
        there = {
            replica.name: replica.outstanding
            for replica in replicas.statistics().replicas
        }
        assert sum(there.values()) == 60
        network.crash(models[1].name)
        results = await asyncio.gather(*once, return_exceptions=True)
        lost = [result for result in results if isinstance(result, BaseException)]
        assert all(isinstance(error, WorkerLostError) for error in lost)
        assert 0 < len(lost) < 30
        assert "model-1" not in await asyncio.gather(*again)
        assert len(lost) + replicas.statistics().retries == there["model-1"]


# --- hedging -------------------------------------------------------------------------


@simulated(SEEDS)
async def test_slow_call_is_hedged_and_its_loser_cancelled(network: Network) -> None:
    async with routed(network, 2) as (replicas, models, _):
        for _ in range(200):
            await replicas.call(read_unless, "nobody", 0.01)
        before = replicas.statistics()
        for _ in range(5):
            answered_by = await replicas.call(read_unless, "model-0", 0.01)
            assert answered_by == "model-1"
        statistics = replicas.statistics()
        won = statistics.hedges_won - before.hedges_won
        to_slow = statistics.replicas[0].calls - before.replicas[0].calls
        assert won == to_slow > 0
        await asyncio.sleep(1.0)
        assert [model.parts.active for model in models] == [0, 0]
        assert [replica.outstanding for replica in statistics.replicas] == [0, 0]


@simulated()
async def test_call_that_is_not_idempotent_is_not_hedged(network: Network) -> None:
    async with routed(network, 2) as (replicas, _, _):
        for _ in range(100):
            await replicas.call(work, 0.01)
        await replicas.call(work, 10.0)
        statistics = replicas.statistics()
        assert statistics.hedges == 0
        assert sum(replica.calls for replica in statistics.replicas) == 101


@simulated(SEEDS)
async def test_cancelled_call_leaves_no_attempt_behind(network: Network) -> None:
    async with routed(network, 2) as (replicas, models, _):
        for _ in range(100):
            await replicas.call(read, 0.01)
        call = asyncio.ensure_future(replicas.call(read, 100.0))
        await asyncio.sleep(1.0)
        assert sum(model.parts.active for model in models) == 2
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await asyncio.sleep(1.0)
        assert sum(model.parts.active for model in models) == 0
        assert [replica.outstanding for replica in replicas.statistics().replicas] == [
            0,
            0,
        ]


# --- coming and going ----------------------------------------------------------------


@pytest.mark.parametrize("delay_s", [0.001, 0.3])
@simulated(SEEDS)
async def test_draining_replicas_fail_no_call(network: Network, delay_s: float) -> None:
    """Also where a call is on its way for long: none is sent into a closed door."""
    async with routed(network, 3) as (replicas, models, announced):
        for model in models:
            network.between("web", model.name).delay(delay_s)
        ended = asyncio.Event()

        async def flood() -> int:
            made_calls = 0
            while not ended.is_set():
                await replicas.call(work, network.rng.uniform(0.0, 0.2))
                made_calls += 1
            return made_calls

        flooding = [asyncio.ensure_future(flood()) for _ in range(20)]
        for model, replica in zip(models[:2], announced[:2], strict=True):
            await asyncio.sleep(1.0)
            assert await replica.drain(60.0)
            assert model.parts.active == 0
            await model.shutdown()
        await asyncio.sleep(1.0)
        ended.set()
        assert sum(await asyncio.gather(*flooding)) > 50
        statistics = replicas.statistics()
        assert [replica.name for replica in statistics.replicas] == ["model-2"]
        assert statistics.retries == 0


@simulated(SEEDS)
async def test_replica_shutdown_fails_no_call(network: Network) -> None:
    async with routed(network, 3) as (replicas, models, _):
        calls: list[asyncio.Future[Any]] = []
        for number in range(100):
            calls.append(asyncio.ensure_future(replicas.call(work, 0.2)))
            await asyncio.sleep(0.01)
            if number == 50:
                calls.append(asyncio.ensure_future(models[1].shutdown()))
        await asyncio.gather(*calls)


@simulated()
async def test_call_waits_for_the_first_replica_and_for_no_ghost(
    network: Network,
) -> None:
    async with Cluster(names=["web"], network=network, options=OPTIONS) as (web,):
        options = serving.ReplicaOptions(ready_timeout_s=1.0)
        async with serving.Replicas(web, "model-*", options=options) as replicas:
            began_s = web.loop.time()
            with pytest.raises(
                RejectedError, match="no worker has a matching name"
            ) as e:
                await replicas.call(whose)
            assert e.value.outcome is Outcome.NOT_EXECUTED
            assert web.loop.time() - began_s == pytest.approx(1.0)


@simulated(SEEDS)
async def test_replica_takes_calls_once_it_is_ready(network: Network) -> None:
    async with (
        group(network, 2, announced=False) as (web, models, _),
        serving.Replica(models[0], ready=False) as first,
        serving.Replica(models[1]),
        serving.Replicas(web, "model-*", options=AT_ONCE) as replicas,
    ):
        await replicas.wait_ready(1)
        names_found = {await replicas.call(whose) for _ in range(20)}
        assert names_found == {"model-1"}
        first.make_ready()
        await replicas.wait_ready(2)
        names_found = {await replicas.call(whose) for _ in range(20)}
        assert names_found == {"model-0", "model-1"}


@simulated(SEEDS)
async def test_unannounced_replica_gets_no_call(network: Network) -> None:
    options = serving.ReplicaOptions(warm_s=0.0, ready_timeout_s=5.0)
    async with (
        group(network, 2, announced=False) as (web, models, _),
        serving.Replicas(web, "model-*", options=options) as replicas,
    ):
        with pytest.raises(RejectedError, match=r"'model-1': it has not said, by "):
            await replicas.call(whose)
        async with serving.Replica(models[1], ready=False) as late:
            waiting = asyncio.ensure_future(replicas.call(whose))
            await asyncio.sleep(3.0)  # virtual: it has been asked since
            assert not waiting.done()
            late.make_ready()
            assert await waiting == "model-1"
            states = [replica.state for replica in replicas.statistics().replicas]
            assert states == ["JOINING", "READY"]


@simulated()
async def test_uncalled_replica_ends_its_slow_start(network: Network) -> None:
    options = serving.ReplicaOptions(warm_s=2.0)
    async with (
        group(network, 1) as (web, _, _),
        serving.Replicas(web, "model-*", options=options) as replicas,
    ):
        await replicas.wait_ready(1)
        states = [replicas.statistics().replicas[0].state]
        await asyncio.sleep(3.0)  # virtual
        states.append(replicas.statistics().replicas[0].state)
        assert states == ["WARMING", "READY"]


# --- streams -------------------------------------------------------------------------


async def count_here(items: int) -> AsyncIterator[str]:
    for _ in range(items):
        await asyncio.sleep(0.01)
        yield here().name


async def count_unless(busy: str) -> AsyncIterator[str]:
    if here().name == busy:
        raise OverloadedError("full", retry_after_s=1.0)
    yield here().name


@simulated(SEEDS)
async def test_stream_moves_before_its_first_item_and_stays_after(
    network: Network,
) -> None:
    async with routed(network, 2) as (replicas, models, _):
        for _ in range(10):
            received = [item async for item in replicas.stream(count_unless, "model-0")]
            assert received == ["model-1"]
        items = replicas.stream(count_here, 1000)
        place = await anext(items)
        by_name = {model.name: model for model in models}
        network.crash(by_name[place].name)
        with pytest.raises(WorkerLostError):
            assert {item async for item in items} == {place}
        assert not any(
            replica.outstanding for replica in replicas.statistics().replicas
        )
