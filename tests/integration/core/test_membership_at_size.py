"""Membership in large groups, in virtual time: what a change costs, and churn."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from asyncrpc import JoinRendezvous, MemberChanges, Options, Worker, WorkerLostError
from asyncrpc.core.ids import WorkerId
from asyncrpc.testing import Cluster
from asyncrpc.testing.cluster import sim_worker
from asyncrpc.testing.loop import SimLoop
from asyncrpc.testing.network import Network
from tests.integration.core import remote

OPTIONS = Options(drain_timeout_s=1.0)
LONG_S = 300.0  # of virtual time


def play(scenario: Callable[[Network], Coroutine[Any, Any, Any]], seed: int) -> Any:
    with asyncio.Runner(loop_factory=SimLoop) as runner:
        return runner.run(scenario(Network(seed, runner.get_loop())))


def newcomer(network: Network, name: str, contact: str) -> Worker:
    where = JoinRendezvous([f"mem://{contact}"])
    return sim_worker(name, network, rendezvous=where, options=OPTIONS)


async def next_changes(changes: Sequence[MemberChanges]) -> Counter[tuple[str, str]]:
    """Wait until everyone has heard of one change; return what they heard."""
    async with asyncio.timeout(LONG_S):
        received = await asyncio.gather(*(anext(change) for change in changes))
    return Counter((change.kind.value, change.member.name) for change in received)


def messages(workers: Sequence[Worker]) -> list[int]:
    return [worker.parts.membership.gossip.sent for worker in workers]


class Losses:
    """What a worker's parts are told of the end of others; a `Service`."""

    name = "losses"
    routes = ()

    def __init__(self, worker: Worker) -> None:
        self.gone: list[WorkerId] = []
        self.reasons: list[str] = []
        worker.parts.add_service(self)

    def on_peer_lost(self, peer: WorkerId, reason: str) -> None:
        self.gone.append(peer)
        self.reasons.append(reason)

    async def close(self) -> None:
        """Nothing is held."""


async def one_joins_and_leaves(network: Network) -> None:
    size = 256
    names = [f"w{number}" for number in range(size)]
    async with Cluster(names=names, network=network, options=OPTIONS) as workers:
        await asyncio.sleep(30.0)  # they compare with their neighbours, and agree
        assert messages(workers) == [0] * size
        assert max(len(worker.parts.directory.links) for worker in workers) <= 2
        changes = [worker.members_changed() for worker in workers]
        losses = [Losses(worker) for worker in workers]
        async with newcomer(network, "late", "w7") as late:
            assert await next_changes(changes) == {("joined", "late"): size}
            sent = messages([*workers, late])
            assert sum(sent) == size  # everyone is told once
            assert max(sent) <= 2 * math.log2(size)
        assert await next_changes(changes) == {("left", "late"): size}
        # Also those drop it who were never connected to it.
        assert all(loss.gone == [late.id] for loss in losses)
        assert sum("it has left" in loss.reasons for loss in losses) > size / 2
        sent = messages(workers)
        assert sum(sent) <= 2 * size
        # Who has news tells its fingers; others are not connected to.
        links_max = max(len(worker.parts.directory.links) for worker in workers)
        assert links_max <= 4 * math.log2(size)


def test_a_change_costs_each_worker_one_message() -> None:
    play(one_joins_and_leaves, seed=1)


async def all_leave_at_once(network: Network) -> int:
    size = 64
    names = [f"w{number}" for number in range(size)]
    async with Cluster(names=names, network=network, options=OPTIONS) as workers:
        await asyncio.sleep(1.0)  # a short program
        for worker in workers:
            assert not worker.parts.directory.links
    return sum(messages(workers))


def test_a_short_program_does_not_pay_for_membership() -> None:
    assert play(all_leave_at_once, seed=1) == 0


class Churn:
    """Fifty workers, of which some join, leave, crash and come back, seeded."""

    def __init__(self, network: Network, size: int) -> None:
        self.network = network
        self.running: dict[str, Worker] = {}
        self.gone: list[str] = []
        self.size = size

    async def step(self, number: int) -> None:
        rng = self.network.rng
        names = sorted(self.running)
        contact = rng.choice(names)
        kind = rng.choice(["join", "leave", "crash", "again"])
        if kind == "again" and self.gone:
            await self.join(self.gone.pop(rng.randrange(len(self.gone))), contact)
        elif kind in {"join", "again"} or len(names) < self.size // 2:
            await self.join(f"late{number}", contact)
        elif kind == "leave":
            name = rng.choice(names)
            await self.running.pop(name).shutdown()
            self.gone.append(name)
        else:
            await self.crash(rng.choice(names))

    async def join(self, name: str, contact: str) -> None:
        self.network.restart(name)
        self.running[name] = await newcomer(self.network, name, contact).__aenter__()

    async def crash(self, name: str) -> None:
        worker = self.running.pop(name)
        self.network.crash(name)
        self.gone.append(name)
        await worker.shutdown(drain_timeout_s=0.0)


async def churn(network: Network) -> None:
    names = [f"w{number}" for number in range(50)]
    async with Cluster(names=names, network=network, options=OPTIONS) as workers:
        world = Churn(network, len(names))
        world.running = {worker.name: worker for worker in workers}
        try:
            for number in range(30):
                await world.step(number)
                await asyncio.sleep(network.rng.expovariate(1.0))
            await agreed(world)
            some = network.rng.sample(sorted(world.running), 10)
            for name, other in itertools.pairwise(some):
                assert await world.running[name].peer(other).call(remote.add, 1) == 2
        finally:
            await asyncio.gather(
                *(worker.shutdown() for worker in world.running.values())
            )


async def agreed(world: Churn) -> None:
    """Wait until all who run know of each other, and of nobody else."""
    truth = {(name, worker.incarnation) for name, worker in world.running.items()}
    async with asyncio.timeout(LONG_S):
        while True:
            known = [
                {
                    (record.name, record.incarnation)
                    for record in worker.parts.membership.table.records
                }
                for worker in world.running.values()
            ]
            if all(view == truth for view in known):
                return
            await asyncio.sleep(1.0)


@pytest.mark.parametrize("seed", range(6))
def test_fifty_workers_agree_after_churn(seed: int) -> None:
    play(churn, seed)


async def all_know(count: int, workers: Sequence[Worker]) -> None:
    """Wait until every worker knows so many."""
    async with asyncio.timeout(LONG_S):
        for worker in workers:
            while len(worker.known_members) != count:  # noqa: ASYNC110  (virtual time)
                await asyncio.sleep(1.0)


async def cut_in_two(network: Network) -> None:
    names = [f"w{number}" for number in range(12)]
    left, right = names[:6], names[6:]
    async with Cluster(names=names, network=network, options=OPTIONS) as workers:
        by_name = {worker.name: worker for worker in workers}
        await asyncio.sleep(10.0)
        for name in left:
            for other in right:
                network.between(name, other).partition()
        await all_know(6, workers)
        with pytest.raises(WorkerLostError):
            await by_name["w0"].peer("w11").call(remote.add, 1)
        changes = by_name["w0"].members_changed()
        for name in left:
            for other in right:
                network.between(name, other).heal()
        async with asyncio.timeout(LONG_S):
            missing = set(right)
            while (
                missing
            ):  # those on this side may be taken for lost, too, for a moment
                change = await anext(changes)
                if change.kind.value == "back":
                    missing.discard(change.member.name)
        await all_know(12, workers)
        assert await by_name["w0"].peer("w11").call(remote.add, 1) == 2


@pytest.mark.parametrize("seed", range(3))
def test_parted_halves_of_a_group_reunite(seed: int) -> None:
    play(cut_in_two, seed)
