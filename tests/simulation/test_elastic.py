"""Elastic groups on virtual time: workers die, come late, or are cut off for long.

Each worker takes the same steps; in each it reduces with all others.  Whatever happens:
nobody waits for ever, all that can go on come to the last step, each step is taken in
one group, and no two groups of one generation get anything done.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import defaultdict
from dataclasses import dataclass, field

import pytest
import torch

from asyncrpc import LimitOptions, LivenessOptions, NetworkOptions, Options, Worker
from asyncrpc.collectives import join_group
from asyncrpc.errors import CollectiveError, GroupChangedError, QuorumLostError
from asyncrpc.testing import Cluster
from asyncrpc.testing.loop import SimLoop
from asyncrpc.testing.network import Network

OPTIONS = Options(
    drain_timeout_s=2.0,
    network=NetworkOptions(connect_timeout_s=3.0),
    liveness=LivenessOptions(heartbeat_s=2.0, lost_after_s=5.0),
    limits=LimitOptions(shared_memory_bytes=0, receive_pool_bytes=0),
)
STEPS = 30
STEP_S = 0.2
HANG_S = 400.0  # of virtual time
SEEDS = range(8)


@dataclass
class Run:
    """What has come of a run.

    Attributes:
        ended: workers that have taken all steps.
        stopped: workers that were told that they are a minority.
        views: by generation, the members that have got something done.
        steps: by step, the views in which it was taken.
    """

    ended: set[str] = field(default_factory=set)
    stopped: set[str] = field(default_factory=set)
    views: dict[int, set[tuple[str, ...]]] = field(
        default_factory=lambda: defaultdict(set)
    )
    steps: dict[int, set[tuple[str, ...]]] = field(
        default_factory=lambda: defaultdict(set)
    )


async def train(worker: Worker, run: Run, min_size: int) -> None:
    """Take all steps, or stop as one of too few."""
    try:
        await take_steps(worker, run, min_size)
    except QuorumLostError:
        run.stopped.add(worker.name)
    else:
        run.ended.add(worker.name)


async def take_steps(worker: Worker, run: Run, min_size: int) -> None:
    group = await join_group(worker, "training", min_size=min_size, timeout_s=100.0)
    step, is_ready = -1, False
    while step < STEPS:
        try:
            if group.has_changed:
                is_ready = False
                await group.reconfigure(step=step)
            if not is_ready:
                if group.source is not None:
                    reached = torch.tensor([max(step, 0)])
                    step = int(await group.current.broadcast(reached, group.source))
                is_ready = True
            total = await group.current.all_reduce(torch.ones(1))
            assert total.item() == group.current.size
            run.views[group.generation].add(group.current.members)
            run.steps[step].add(group.current.members)
            step += 1
            await asyncio.sleep(STEP_S)
        except QuorumLostError:
            group.close()
            raise
        except CollectiveError:
            is_ready = False
            try:
                await group.reconfigure(step=step)
            except QuorumLostError:
                group.close()
                raise
            except GroupChangedError:  # the others have gone on: come in again
                group = await join_group(worker, "training", timeout_s=100.0)
                step = -1
            except CollectiveError:
                continue
    group.close()


async def play(network: Network, rng: random.Random, trouble: str) -> Run:
    run = Run()
    async with (
        asyncio.timeout(HANG_S),
        Cluster(5, network=network, options=OPTIONS) as (*workers,),
    ):
        for worker in workers:
            for other in workers:
                if worker.name < other.name:
                    network.between(worker.name, other.name).delay(
                        rng.uniform(0.001, 0.02)
                    )
        tasks = {
            worker.name: asyncio.create_task(train(worker, run, 4))
            for worker in workers[:4]
        }
        await asyncio.sleep(rng.uniform(0.2, 3.0))
        tasks["e"] = asyncio.create_task(train(workers[4], run, 1))
        await asyncio.sleep(rng.choice([0.0, 0.05, 1.0]))
        for name in rng.sample("abcd", 2) if trouble == "deaths" else ():
            tasks.pop(name).cancel()
            network.crash(name, silent=rng.random() < 0.5)
            await asyncio.sleep(rng.choice([0.0, 0.01, 0.3]))
        if trouble == "partition":
            for left, right in itertools.product("ab", "cde"):
                network.between(left, right).partition()
            await asyncio.sleep(20.0)
            network.heal_all()
        await asyncio.gather(*tasks.values())
    return run


@pytest.mark.parametrize("trouble", ["newcomer", "deaths", "partition"])
@pytest.mark.parametrize("seed", SEEDS)
def test_elastic_group_continues_as_one(trouble: str, seed: int) -> None:
    with asyncio.Runner(loop_factory=SimLoop) as runner:
        network = Network(seed, runner.get_loop())
        run = runner.run(play(network, random.Random(seed), trouble))
    for generation, views in run.views.items():
        assert len(views) == 1, f"generation {generation} is {views}"
    if trouble == "newcomer":
        assert run.ended == set("abcde")
    if trouble == "partition":
        assert run.ended
    if run.ended:
        assert set(run.steps) == set(range(STEPS))
    else:
        assert run.stopped
