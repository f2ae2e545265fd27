"""What must hold at whatever moment a worker dies, dials or is cut off.

Every moment is drawn from the seed, and time is virtual: a run that hangs is a
`DeadlockError` that names who waits, or exceeds the limit of its scenario.
"""

from __future__ import annotations

import asyncio

import pytest

import asyncrpc
from asyncrpc import NetworkOptions, Options, Outcome, Worker, WorkerLostError
from asyncrpc.testing import Cluster
from asyncrpc.testing.cluster import sim_worker
from asyncrpc.testing.network import Network
from tests.simulated import Scenario, play

SEEDS = range(20)
OPTIONS = Options(drain_timeout_s=2.0, network=NetworkOptions(connect_timeout_s=5.0))


async def whose() -> int:
    return asyncrpc.current_worker().incarnation


@asyncrpc.on_loop
def echo(value: int) -> int:
    return value


async def stay() -> None:
    await asyncio.Event().wait()


async def spend(seconds: float, to: list[str]) -> None:
    """Sleep on the last of the workers, called through all the others."""
    if not to:
        await asyncio.sleep(seconds)
        return
    await asyncrpc.current_worker().peer(to[0]).call(spend, seconds, to[1:])


async def later(network: Network, most_s: float) -> None:
    await asyncio.sleep(network.rng.uniform(0.0, most_s))


# --- scenarios -----------------------------------------------------------------------


async def a_death_at_a_barrier(network: Network) -> None:
    """All who live learn of it, soon; or all pass, for it died after it had come."""
    count = network.rng.randrange(2, 9)
    async with Cluster(count, network=network, options=OPTIONS) as workers:
        victim = network.rng.choice(workers)
        survivors = [worker for worker in workers if worker is not victim]

        async def come(worker: Worker) -> None:
            await later(network, 0.05)
            await worker.barrier()

        async def die() -> None:
            await later(network, 0.08)
            network.crash(victim.name)
            await victim.shutdown(drain_timeout_s=0)

        coming = [asyncio.create_task(come(worker)) for worker in survivors]
        last = asyncio.create_task(come(victim))
        await die()
        ended = await asyncio.gather(*coming, return_exceptions=True)
        assert all(
            result is None or isinstance(result, WorkerLostError) for result in ended
        )
        last.cancel()
        await asyncio.gather(last, return_exceptions=True)


async def dials_that_cross(network: Network) -> None:
    """No call is lost in silence, and in the end there is one connection."""
    link = network.between("a", "b")
    link.delay(network.rng.choice([0.0001, 0.01, 0.1]))
    async with Cluster(2, network=network, options=OPTIONS) as (a, b):

        async def call(worker: Worker, to: str, number: int) -> None:
            await later(network, 2.0)
            try:
                assert await worker.peer(to).call(echo, number) == number
            except WorkerLostError as error:
                assert error.outcome is not Outcome.EXECUTED  # noqa: PT017

        async with asyncio.TaskGroup() as calls:
            for number in range(40):
                worker, to = ((a, "b"), (b, "a"))[number % 2]
                calls.create_task(call(worker, to, number))
            for _ in range(4):
                await later(network, 0.5)
                link.drop_connections()
        await asyncio.sleep(5.0)
        assert await a.peer("b").call(echo, 1) == 1
        assert await b.peer("a").call(echo, 2) == 2
        assert len(a.parts.directory.links) == len(b.parts.directory.links) == 1


async def a_restart_under_the_same_name(network: Network) -> None:
    """Its old life's calls fail as soon as the new one is heard of."""
    names = {name: f"mem://{name}" for name in "ab"}
    a, old, new = (
        sim_worker(name, network, rendezvous=names, options=OPTIONS) for name in "abb"
    )
    async with a:
        await old.__aenter__()
        await a.peer("b").call(whose)
        waiting = a.parts.start_call("b", stay)
        await later(network, 0.1)
        network.crash("b", silent=network.rng.random() < 0.5)
        await old.shutdown(drain_timeout_s=0)
        network.restart("b")
        async with new:
            assert await new.peer("a").call(whose) == a.incarnation
            with pytest.raises(WorkerLostError) as caught:
                await asyncio.wait_for(waiting, 1.0)
            assert caught.value.outcome is Outcome.UNKNOWN
            assert await a.peer("b").call(whose) == new.incarnation


async def deadlines_on_the_way(network: Network) -> None:
    """A caller waits exactly as long as it said, however many workers are between."""
    network.between("a", "b").delay(network.rng.choice([0.001, 0.5]))
    async with Cluster(3, network=network, options=OPTIONS) as (a, _, c):
        allowed_s = network.rng.uniform(1.0, 3.0)
        began_s = a.loop.time()
        with pytest.raises(asyncrpc.DeadlineExceededError):
            async with asyncrpc.deadline(allowed_s):
                await a.peer("b").call(spend, 50.0, ["c"])
        assert a.loop.time() - began_s == pytest.approx(allowed_s, abs=1e-6)
        await asyncio.sleep(5.0)
        assert c.parts.active == 0


SCENARIOS = [
    a_death_at_a_barrier,
    dials_that_cross,
    a_restart_under_the_same_name,
    deadlines_on_the_way,
]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenario_keeps_its_invariants_for_every_seed(
    scenario: Scenario, seed: int
) -> None:
    play(scenario, seed)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_same_seed_gives_the_same_run(scenario: Scenario) -> None:
    first = list(play(scenario, 7).trace)
    assert first
    assert list(play(scenario, 7).trace) == first
    assert list(play(scenario, 8).trace) != first
