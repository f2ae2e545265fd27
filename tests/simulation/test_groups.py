"""Groups under faults: some seeds of every scenario; `make sim-nightly` runs thousands.

`make sim SCENARIO=losses SEED=7` runs one, and prints what it did last.
"""

from __future__ import annotations

import asyncio
import random

import pytest
import torch

from asyncrpc import Group
from asyncrpc.testing import Cluster
from asyncrpc.testing.loop import SimLoop
from asyncrpc.testing.network import Network
from tests.simulation.__main__ import command
from tests.simulation.group_programs import KINDS, problem_with, program
from tests.simulation.group_scenarios import PLANS, play_groups

SEEDS = range(12)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("scenario", PLANS)
def test_groups_keep_their_invariants_for_every_seed(scenario: str, seed: int) -> None:
    result = play_groups(scenario, seed)
    assert result.problems == [], command(scenario, seed, None)
    assert result.world.done["take_part"] > 1


@pytest.mark.slow
@pytest.mark.parametrize("scenario", PLANS)
def test_sixteen_ranks_keep_the_invariants(scenario: str) -> None:
    assert play_groups(scenario, 1, workers=16).problems == []


@pytest.mark.parametrize("scenario", PLANS)
def test_seed_gives_the_same_run_again(scenario: str) -> None:
    first, second, other = (
        play_groups(scenario, seed, workers=3).digest for seed in (5, 5, 6)
    )
    assert first == second != other


@pytest.mark.parametrize("cut_s", [0.05, 0.15, 0.25])
def test_connection_broken_during_its_setup_ends_no_group(cut_s: float) -> None:
    """It is made again: nobody was lost."""

    async def meet() -> list[float]:
        async with Cluster(2, network=network) as workers:
            link = network.between("a", "b")
            link.delay(0.1)
            groups = [Group(worker, timeout_s=60.0) for worker in workers]
            tensors = [torch.ones(2) for _ in groups]
            network.loop.call_later(cut_s, link.drop_connections)
            await asyncio.gather(
                *(
                    group.all_reduce(of)
                    for group, of in zip(groups, tensors, strict=True)
                )
            )
            assert any("drop connections" in event for _, event in network.trace)
            return [tensor[0].item() for tensor in tensors]

    with asyncio.Runner(loop_factory=SimLoop) as runner:
        network = Network(1, runner.get_loop())
        assert runner.run(meet()) == [2.0, 2.0]


def test_checks_notice_a_wrong_bit() -> None:
    """Of every kind of collective that gives a tensor."""
    seen = set()
    for op in program(random.Random(3), ranks=4, count=200):
        for rank in range(4):
            got = [tensor.clone() for tensor in op.expected(rank)]
            assert problem_with(op, rank, got) == ""
            if got and got[-1].numel():
                got[-1].view(-1)[-1] += 1
                assert problem_with(op, rank, got)
                seen.add(op.kind)
    assert seen == set(KINDS) - {"barrier"}
