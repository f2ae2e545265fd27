"""Workers on a network that delays, parts and crashes, in virtual time.

The same seed gives the same run, event by event.  To look at one run, give its seed to
`play`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

import asyncrpc
from asyncrpc import NetworkOptions, Options, Outcome, Worker
from asyncrpc.testing import Cluster
from asyncrpc.testing.loop import SimLoop
from asyncrpc.testing.network import Network

SEEDS = range(20)
OPTIONS = Options(
    drain_timeout_s=5.0,
    network=NetworkOptions(connect_timeout_s=10.0),
    rendezvous_timeout_s=60,
)
runs: Counter[int] = Counter()  # how often each call of a scenario ran


async def note(call: int) -> int:
    runs[call] += 1
    return call


def note_plain(call: int) -> int:
    runs[call] += 1
    return call


async def relay(to: str, call: int) -> int:
    return await asyncrpc.current_worker().peer(to).call(note, call)


async def stay() -> None:
    await asyncio.Event().wait()


Scenario = Callable[[Network], Coroutine[Any, Any, Any]]


def play(scenario: Scenario, seed: int) -> list[tuple[float, str]]:
    """Run a scenario to its end, and return what happened on the network."""
    runs.clear()
    with asyncio.Runner(loop_factory=SimLoop) as runner:
        network = Network(seed, runner.get_loop())
        runner.run(scenario(network))
        return list(network.trace)


async def delays(network: Network) -> None:
    """Every call is answered and ran once, however long messages take."""
    for pair in ("ab", "bc", "ac"):
        network.between(*pair).delay(network.rng.choice([0.0001, 0.01, 0.1]))
        network.between(*pair).lose(network.rng.choice([0.0, 0.05]))
    async with Cluster(3, network=network, options=OPTIONS) as (a, b, c):
        pattern: list[tuple[Worker, str, Any, tuple[str, ...]]] = [
            (a, "b", note, ()),
            (b, "a", note_plain, ()),
            (a, "c", relay, ("b",)),
            (b, "c", note, ()),
            (c, "a", relay, ("c",)),
        ]
        calls = [
            worker.parts.start_call(to, function, (*args, number))
            for number, (worker, to, function, args) in enumerate(pattern * 4)
        ]
        assert await asyncio.gather(*calls) == list(range(20))
    assert runs == Counter(range(20))


async def death_before_the_first_message(network: Network) -> None:
    """Who dialed and died is missed, though nothing came over its connection.

    In a static group nobody else tells of it.
    """
    network.between("a", "c").delay(0.1)
    options = replace(OPTIONS, membership="static")
    async with Cluster(3, network=network, options=options) as (a, _, c):
        changes = a.members_changed()
        dialing = asyncio.create_task(c.parts.link_to("a"))
        while (link := a.parts.directory.link_of(c.incarnation)) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # of virtual time
        assert not link.is_proven
        network.crash("c")
        await c.shutdown(drain_timeout_s=0)
        await asyncio.wait({dialing})
        dialing.exception()
        async with asyncio.timeout(60):
            lost = await anext(changes)
        assert (lost.kind, lost.member.name) == ("lost", "c")
        assert a.parts.directory.link_of(c.incarnation) is None
        assert not link.is_proven


async def partition_and_heal(network: Network) -> None:
    """A cut that is short costs time; one that lasts ends the link, at both ends.

    A call that its deadline ends may have run, once; one that was made during the cut
    has not.  After it calls succeed, whatever became of the link.
    """
    async with Cluster(2, network=network, options=OPTIONS) as (a, b):
        assert await a.peer("b").call(note, 0) == 0
        before = a.parts.directory.find("b").link
        network.between("a", "b").partition()
        begun_s = a.loop.time()
        with pytest.raises(TimeoutError):
            async with asyncrpc.deadline(3.0):
                await a.peer("b").call(note, 1)
        assert 3.0 <= a.loop.time() - begun_s < 3.1
        is_long = network.rng.random() < 0.5
        await asyncio.sleep(30.0 if is_long else 1.0)
        network.between("a", "b").drop_connections()
        await asyncio.sleep(0.1)
        with pytest.raises(asyncrpc.CallError) as caught:
            async with asyncrpc.deadline(2.0):
                await a.peer("b").call(note, 2)
        assert caught.value.outcome is Outcome.NOT_EXECUTED
        network.between("a", "b").heal()
        assert await a.peer("b").call(note, 3) == 3
        assert (a.parts.directory.find("b").link is before) is not is_long
        assert await b.peer("a").call(note, 4) == 4
    assert runs[2] == 0
    assert max(runs.values()) == 1


async def crash(network: Network) -> None:
    """Who called a worker that dies is told; the others go on."""
    async with Cluster(3, network=network, options=OPTIONS) as (a, b, c):
        rref = a.peer("b").remote(note, 0)
        await rref
        call = a.parts.start_call("b", stay)
        through = c.parts.start_call("a", relay, ("b", 1))
        assert await through == 1
        network.crash("b")
        with pytest.raises(asyncrpc.WorkerLostError) as caught:
            await call
        assert caught.value.outcome is Outcome.UNKNOWN
        with pytest.raises(asyncrpc.OwnerLostError):
            await rref.to_here()
        with pytest.raises(asyncrpc.WorkerLostError):
            await c.peer("a").call(relay, "b", 2)
        assert await c.peer("a").call(note, 3) == 3
        await b.shutdown(drain_timeout_s=0)


SCENARIOS = [delays, death_before_the_first_message, partition_and_heal, crash]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenario_keeps_its_invariants_for_every_seed(
    scenario: Scenario, seed: int
) -> None:
    play(scenario, seed)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_same_seed_gives_the_same_run(scenario: Scenario) -> None:
    first = play(scenario, 7)
    assert first
    assert play(scenario, 7) == first
    assert play(scenario, 8) != first
