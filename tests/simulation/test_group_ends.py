"""Three workers end together, in every order of asking, loss and restart.

Between the events there is sometimes time and sometimes none, and sometimes a link
carries nothing for a while.  A restarted worker names its rank, or gets it from the
group.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from typing import Final, TypeAlias

import pytest

from asyncrpc import LocalRendezvous, NetworkOptions, Options, Worker
from asyncrpc.errors import RendezvousTimeoutError
from asyncrpc.testing.cluster import sim_worker
from asyncrpc.testing.network import Network
from tests.simulated import play

NAMES: Final = "abc"
OPTIONS: Final = Options(
    drain_timeout_s=5.0,
    network=NetworkOptions(connect_timeout_s=10.0),
    rendezvous_timeout_s=60,
)
SETTLED_S: Final = 30.0  # in which a loss is noticed and told
SLOW: Final = pytest.mark.slow  # all cases: a minute
# A worker asks for the end; the victim dies, and comes back.
Event: TypeAlias = tuple[str, str]


def orders() -> Iterator[tuple[Event, ...]]:
    """Yield every order: the victim may have asked before it dies, and asks again."""
    for victim in NAMES:
        others = [("asks", name) for name in NAMES if name != victim]
        life = [("dies", victim), ("returns", victim), ("asks", victim)]
        for fate in life, [("asks", victim), *life]:
            length = len(others) + len(fate)
            for places in itertools.permutations(range(length), len(others)):
                rest = iter(fate)
                at = dict(zip(places, others, strict=True))
                yield tuple(at.get(i) or next(rest) for i in range(length))


class Group:
    """Three workers, those that have asked for the end, and those that are there."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.rendezvous = LocalRendezvous(len(NAMES))
        self.workers: dict[str, Worker] = {}
        self.ending: dict[str, asyncio.Task[None]] = {}

    async def start(self, name: str, rank: int | None) -> None:
        worker = sim_worker(
            name,
            self.network,
            rank=rank,
            world_size=len(NAMES),
            rendezvous=self.rendezvous,
            options=OPTIONS,
        )
        await worker.__aenter__()
        self.workers[name] = worker

    @property
    def is_over(self) -> bool:
        """Whether no worker is left that another life could join."""
        return all(worker.is_draining for worker in self.workers.values())

    async def take(self, event: Event) -> None:
        kind, name = event
        if kind == "asks":
            self.ending[name] = asyncio.create_task(self._end(name))
        elif kind == "dies":
            self.network.crash(name, silent=self.network.rng.random() < 0.5)
            worker = self.workers.pop(name)
            if name in self.ending:
                self.ending.pop(name).cancel()
            await worker.shutdown(drain_timeout_s=0)
        elif not self.is_over:
            self.network.restart(name)
            have_asked = self.workers.keys() <= self.ending.keys()
            try:
                names_rank = self.network.rng.random() < 0.5
                await self.start(name, NAMES.index(name) if names_rank else None)
            except RendezvousTimeoutError:  # they ended before it could come
                assert have_asked

    async def _end(self, name: str) -> None:
        worker = self.workers[name]
        await worker.shutdown(graceful=True)
        # A worker whose time to drain is over ends without a life that it has not heard
        # of; within `SETTLED_S` it has heard.
        living = {to for to in self.workers if self.knows(worker, to)}
        assert living <= {*self.ending, name}, f"{name} ended before all had asked"

    def knows(self, worker: Worker, to: str) -> bool:
        """Return whether a worker has heard of the present life of another."""
        record = worker.parts.membership.table.get(to)
        return record is not None and record.incarnation == self.workers[to].incarnation

    async def check_served(self) -> None:
        """The workers that have not asked are served by all that rightly go on."""
        ended = {name for name, task in self.ending.items() if task.done()}
        for name in ended:
            await self.ending[name]
        serving = [name for name in self.workers if name not in ended]
        for name, to in itertools.product(serving, serving):
            assert self.knows(self.workers[name], to)
            if name not in self.ending:
                assert await self.workers[name].peer(to).call(abs, -1) == 1


@pytest.mark.parametrize("seed", [0, *(pytest.param(i, marks=SLOW) for i in (1, 2))])
@pytest.mark.parametrize(
    "order", [*orders()], ids=lambda order: "-".join(map("".join, order))
)
def test_workers_end_after_all_living_ones_have_asked(
    order: tuple[Event, ...], seed: int
) -> None:
    async def scenario(network: Network) -> None:
        rng, group = network.rng, Group(network)
        async with asyncio.TaskGroup() as starting:
            for rank, name in enumerate(NAMES):
                starting.create_task(group.start(name, rank))
        for event in order:
            if event[0] == "asks" and event[1] not in group.workers:
                continue  # the group had ended before it came back
            await group.take(event)
            if rng.random() < 0.5:
                network.between(*rng.sample(NAMES, 2)).clog(rng.uniform(0.0, 3.0))
            if rng.random() < 0.5 or event[0] == "returns":
                await asyncio.sleep(SETTLED_S)
                await group.check_served()
        await asyncio.gather(*group.ending.values())

    play(scenario, seed)
