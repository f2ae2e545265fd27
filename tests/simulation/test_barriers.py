"""Rendezvous of thousands, and of a few under faults: nobody waits for ever.

Virtual time: a run that hangs is a `DeadlockError` that names who waits, or exceeds the
limit.  Each member enters the number of its call in its payload, so that a result shows
whether calls were matched by count.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from asyncrpc import (
    AsyncRpcError,
    LimitOptions,
    LivenessOptions,
    NetworkOptions,
    Options,
    Worker,
    WorkerLostError,
)
from asyncrpc.collectives import rendezvous
from asyncrpc.core.barriers.machine.series import tree_position
from asyncrpc.core.membership.rendezvous import UNKNOWN_INCARNATION, Member
from asyncrpc.errors import BarrierBrokenError, BarrierTimeoutError
from asyncrpc.testing import Cluster
from asyncrpc.testing.cluster import sim_worker
from asyncrpc.testing.network import Network
from tests.simulated import Scenario, play

OPTIONS = Options(
    drain_timeout_s=2.0,
    network=NetworkOptions(connect_timeout_s=5.0),
    liveness=LivenessOptions(heartbeat_s=2.0, lost_after_s=5.0),
    limits=LimitOptions(shared_memory_bytes=0, receive_pool_bytes=0),
)

# --- thousands -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Neighbourhood:
    """A rendezvous that tells a worker of its neighbours in the tree, and of no other.

    So it is seen that it needs no other; and thousands of workers that each know all
    would not fit into one process.
    """

    world_size: int

    async def join(self, member: Member, timeout_s: float) -> Sequence[Member]:
        above, branches = tree_position(member.rank, self.world_size)
        ranks = [member.rank, *(branch.start for branch in branches)]
        return [
            Member(f"w{rank}", rank, UNKNOWN_INCARNATION, (f"mem://w{rank}",))
            for rank in (ranks if above is None else [above, *ranks])
        ]

    async def leave(self, timeout_s: float) -> None:
        """Nothing is held."""


def neighbours(network: Network, size: int) -> list[Worker]:
    options = Options(
        membership="static",
        limits=LimitOptions(shared_memory_bytes=0, receive_pool_bytes=0),
    )
    where = Neighbourhood(size)
    return [
        sim_worker(f"w{rank}", network, rank=rank, rendezvous=where, options=options)
        for rank in range(size)
    ]


@pytest.mark.parametrize(
    "size",
    [64, 500, pytest.param(4096, marks=[pytest.mark.slow, pytest.mark.timeout(900)])],
)
def test_rendezvous_of_thousands_takes_three_connections_each(size: int) -> None:
    """Full workers and every byte of their connections; 4,096 take half a minute."""
    names = [b"w%d" % rank for rank in range(size)]

    async def meet(worker: Worker, tag: str) -> bool:
        return await rendezvous(worker, tag, worker.name.encode()) == names

    async def scenario(network: Network) -> None:
        workers = neighbours(network, size)
        for worker in workers:
            await worker.__aenter__()
        assert all(await asyncio.gather(*(meet(worker, "first") for worker in workers)))
        sent, begun_s = network.sent, network.loop.time()
        assert all(
            await asyncio.gather(*(meet(worker, "second") for worker in workers))
        )
        took_s = network.loop.time() - begun_s
        links = Counter(len(worker.parts.directory.links) for worker in workers)
        assert max(links) <= 3
        assert sum(count * number for count, number in links.items()) == 2 * (size - 1)
        depth = size.bit_length() - 1
        # On each connection a report and a result, then two requests and their answers;
        # a few more if a worker was silent for long.  A message takes 1 ms on average,
        # the slowest of so many 10: up and down the tree, and up and down again.
        assert network.sent - sent < 8 * size
        assert took_s < 2 * (2 + 2) * depth * 0.01
        await asyncio.gather(
            *(worker.shutdown(drain_timeout_s=0.0) for worker in workers)
        )

    play(scenario, 1)


# --- faults --------------------------------------------------------------------------

ROUNDS = 5


class Course:
    """Workers that meet under several tags at once, each some rounds.

    Attributes:
        network: between them.
        workers: those who begin.
        gone: names of those that have died.
        problems: what should not have been.
    """

    def __init__(self, network: Network, workers: list[Worker]) -> None:
        self.network = network
        self.workers = workers
        self.gone: set[str] = set()
        self.problems: list[str] = []
        ranks = range(len(workers))
        some = network.rng.sample(ranks, network.rng.randint(2, len(workers)))
        self.series: list[tuple[str, tuple[int, ...] | None]] = [
            ("x", None),
            ("y", None),
            ("z", tuple(some)),
        ]

    async def take_part(
        self, worker: Worker, which: int, rounds: int, *, hasty: bool
    ) -> int:
        """Meet some times; return how often it went well."""
        tag, replicas = self.series[which]
        if replicas is not None and worker.rank not in replicas:
            return rounds
        ranks = range(len(self.workers)) if replicas is None else replicas
        rng, passed = self.network.rng, 0
        for number in range(rounds):
            await asyncio.sleep(rng.expovariate(10.0))
            timeout_s = rng.uniform(0.0, 0.5) if hasty and rng.random() < 0.1 else None
            payload = f"{worker.rank} {number}".encode()
            try:
                async with asyncio.timeout(
                    rng.uniform(0.0, 0.5) if hasty and rng.random() < 0.1 else None
                ):
                    result = await rendezvous(
                        worker, tag, payload, replicas, timeout_s=timeout_s
                    )
            except (BarrierBrokenError, WorkerLostError, TimeoutError) as error:
                self._examine(error)
            else:
                passed += 1
                if result != [f"{rank} {number}".encode() for rank in ranks]:
                    self.problems.append(f"{worker.name} got {result} for {number}")
        return passed

    def _examine(self, error: Exception) -> None:
        if isinstance(error, WorkerLostError) and error.to not in self.gone:
            self.problems.append(f"{error.to} lives: {error}")
        is_named = "rank " in str(error) or "others" in str(error)
        if isinstance(error, AsyncRpcError) and not (
            is_named or isinstance(error, BarrierTimeoutError)
        ):
            self.problems.append(f"it names nobody: {error}")

    async def all_take_part(self, rounds: int, *, hasty: bool = False) -> list[int]:
        return await asyncio.gather(
            *(
                self.take_part(worker, which, rounds, hasty=hasty)
                for worker in self.workers
                for which in range(len(self.series))
                if worker.name not in self.gone
            )
        )

    async def disturb(self) -> None:
        """Break connections, and hold up what they carry."""
        rng = self.network.rng
        for _ in range(6):
            await asyncio.sleep(rng.expovariate(10.0))
            first, other = rng.sample([worker.name for worker in self.workers], 2)
            link = self.network.between(first, other)
            if rng.random() < 0.5:
                link.drop_connections()
            else:
                link.clog(rng.uniform(0.0, 1.0))

    def slow_down(self) -> None:
        names = [worker.name for worker in self.workers]
        for pair in ((a, b) for a in names for b in names if a < b):
            self.network.between(*pair).delay(self.network.rng.uniform(0.0001, 0.03))


async def all_live(network: Network) -> None:
    count = network.rng.randrange(2, 9)
    async with Cluster(count, network=network, options=OPTIONS) as workers:
        course = Course(network, workers)
        course.slow_down()
        passed, _ = await asyncio.gather(course.all_take_part(ROUNDS), course.disturb())
        assert course.problems == []
        assert set(passed) == {ROUNDS}


async def members_give_up(network: Network) -> None:
    """What fails does so for all; afterwards everything works again."""
    count = network.rng.randrange(2, 9)
    async with Cluster(count, network=network, options=OPTIONS) as workers:
        course = Course(network, workers)
        course.slow_down()
        await asyncio.gather(course.all_take_part(ROUNDS, hasty=True), course.disturb())
        assert course.problems == []
        assert set(await course.all_take_part(2)) == {2}
        assert course.problems == []


async def member_dies(network: Network) -> None:
    """All who live learn of it, whatever they were about; none of them waits."""
    count = network.rng.randrange(2, 9)
    async with Cluster(count, network=network, options=OPTIONS) as workers:
        course = Course(network, workers)
        victim = network.rng.choice(workers)
        course.gone.add(victim.name)
        last = [
            asyncio.create_task(course.take_part(victim, which, ROUNDS, hasty=False))
            for which in range(3)
        ]

        async def die() -> None:
            await asyncio.sleep(network.rng.uniform(0.0, 0.5))
            network.crash(victim.name, silent=network.rng.random() < 0.5)
            await victim.shutdown(drain_timeout_s=0)
            for task in last:
                task.cancel()
            await asyncio.gather(*last, return_exceptions=True)

        passed, _ = await asyncio.gather(course.all_take_part(ROUNDS), die())
        assert course.problems == []
        assert min(passed) < ROUNDS


async def member_restarts(network: Network) -> None:
    """The new life is in step with the others, who had met before.

    They may find only now that the former one is gone, and have to try again.
    """
    names = {name: f"mem://{name}" for name in "abcd"}

    def make(name: str) -> Worker:
        return sim_worker(
            name, network, rank=ord(name) - 97, rendezvous=names, options=OPTIONS
        )

    async with contextlib.AsyncExitStack() as stack:
        workers: list[Worker] = [
            await stack.enter_async_context(make(name)) for name in "abcd"
        ]
        course = Course(network, workers)
        rounds = network.rng.randrange(1, 4)
        assert set(await course.all_take_part(rounds)) == {rounds}
        old = network.rng.choice(workers)
        network.crash(old.name)
        await old.shutdown(drain_timeout_s=0)
        network.restart(old.name)
        course.workers[old.rank] = await stack.enter_async_context(make(old.name))

        async def try_again(worker: Worker, which: int) -> None:
            tag, replicas = course.series[which]
            await asyncio.sleep(network.rng.expovariate(1.0))
            while replicas is None or worker.rank in replicas:
                try:
                    await rendezvous(worker, tag, b"again", replicas)
                except WorkerLostError as error:
                    assert error.to == old.name  # noqa: PT017
                else:
                    break

        async with asyncio.TaskGroup() as trying:
            for worker in course.workers:
                for which in range(3):
                    trying.create_task(try_again(worker, which))
        assert set(await course.all_take_part(2)) == {2}
        assert course.problems == []


SCENARIOS = [all_live, members_give_up, member_dies, member_restarts]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_rounds_keep_their_invariants_for_every_seed(
    scenario: Scenario, seed: int
) -> None:
    play(scenario, seed)
