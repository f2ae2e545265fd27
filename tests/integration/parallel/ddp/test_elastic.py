"""Data parallel training in an elastic group equals that of one process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from asyncrpc import ElasticGroup, Group, Options, UsageError, Worker, join_group
from asyncrpc.ddp import DistributedDataParallel, broadcast_state, fp16_compress_hook
from asyncrpc.errors import CollectiveError
from asyncrpc.testing import Cluster

OPTIONS = Options(drain_timeout_s=0.5)
LIMIT_S = 60.0  # which only a hang takes
BATCH = 12  # for 3 ranks and 2, and uneven for 5


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()


def batch_of(step: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, 4, generator=draw, dtype=torch.float64)


def alone(steps: int) -> nn.Module:
    """Train in one process."""
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        net(batch_of(step)).square().mean().backward()
        optimizer.step()
    return net


class Trainer:
    """One member."""

    def __init__(self, group: ElasticGroup, bucket_cap_mb: float = 25.0) -> None:
        self.group = group
        self.net = network()
        self.model = DistributedDataParallel(
            self.net, group.current, bucket_cap_mb=bucket_cap_mb
        )
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        self.step = -1

    async def catch_up(self) -> None:
        source = self.group.source
        if source is not None:
            mine: Any = self.net.state_dict(), self.optimizer.state_dict(), self.step
            mine = await broadcast_state(self.group.current, mine, source)
            self.net.load_state_dict(mine[0])
            self.optimizer.load_state_dict(mine[1])
            self.step = max(mine[2], 0)
        await self.model.regroup(self.group.current)

    async def train(self, steps: int) -> None:
        for _ in range(steps):
            ranks = self.group.current
            mine = batch_of(self.step).tensor_split(ranks.size)[ranks.rank]
            self.optimizer.zero_grad()
            loss = self.model(mine).square().sum() * ranks.size / BATCH
            await self.model.backward(loss)
            self.optimizer.step()
            self.step += 1


async def all_of(coroutines: Any) -> list[Any]:
    async with asyncio.timeout(LIMIT_S):
        return list(await asyncio.gather(*coroutines))


async def members(workers: Sequence[Worker]) -> list[ElasticGroup]:
    return await all_of(
        join_group(worker, "training", min_size=len(workers)) for worker in workers
    )


def same(left: nn.Module, right: nn.Module) -> None:
    for parameter, other in zip(left.parameters(), right.parameters(), strict=True):
        torch.testing.assert_close(parameter, other, rtol=1e-12, atol=1e-12)


async def test_training_with_changing_members_equals_one_process() -> None:
    async with Cluster(5, options=OPTIONS) as workers:
        # Buckets so small that their order counts.
        trainers = [Trainer(group, 1e-4) for group in await members(workers[:3])]
        await all_of(trainer.catch_up() for trainer in trainers)
        await all_of(trainer.train(3) for trainer in trainers)
        trainers.pop(0).group.close()  # the first rank leaves
        with pytest.raises(CollectiveError):
            await trainers[0].train(1)
        await all_of(
            trainer.group.reconfigure(step=trainer.step) for trainer in trainers
        )
        assert trainers[0].group.source is None
        await all_of(trainer.catch_up() for trainer in trainers)
        await all_of(trainer.train(2) for trainer in trainers)
        late = asyncio.gather(
            *(join_group(worker, "training") for worker in workers[3:])
        )
        while len(trainers[0].group.newcomers) + len(trainers[1].group.newcomers) < 4:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await all_of(
            trainer.group.reconfigure(step=trainer.step) for trainer in trainers
        )
        trainers += [Trainer(group, 1e-4) for group in await late]
        await all_of(trainer.catch_up() for trainer in trainers)
        assert [trainer.step for trainer in trainers] == [5] * 4
        await all_of(trainer.train(4) for trainer in trainers)
        for trainer in trainers:
            same(trainer.net, alone(9))


async def test_hook_survives_a_reconfiguration() -> None:
    async with Cluster(2, options=OPTIONS) as workers:
        trainers = [Trainer(group) for group in await members(workers)]
        for trainer in trainers:
            trainer.model.register_comm_hook(None, fp16_compress_hook)
        await all_of(trainer.catch_up() for trainer in trainers)
        await all_of(trainer.train(1) for trainer in trainers)
        await all_of(trainer.group.reconfigure(step=1) for trainer in trainers)
        await all_of(trainer.catch_up() for trainer in trainers)
        await all_of(trainer.train(1) for trainer in trainers)
        with pytest.raises(UsageError, match="already"):
            trainers[0].model.register_comm_hook(None, fp16_compress_hook)
        pairs = zip(trainers[0].net.parameters(), alone(2).parameters(), strict=True)
        for got, wanted in pairs:
            torch.testing.assert_close(got, wanted, rtol=1e-2, atol=1e-3)


async def test_state_reaches_all_ranks() -> None:
    async with Cluster(3, options=OPTIONS) as workers:
        groups = [Group(worker) for worker in workers]
        state = {"numbers": [1, 2.5, "x"], "tensor": torch.arange(5_000_000)}
        states = [None, state, None]
        for got in await all_of(
            broadcast_state(group, own_state, 1)
            for group, own_state in zip(groups, states, strict=True)
        ):
            assert got["numbers"] == state["numbers"]
            assert torch.equal(got["tensor"], torch.arange(5_000_000))


async def test_unsavable_state_fails_on_all_ranks() -> None:
    async with Cluster(2, options=OPTIONS) as workers:
        groups = [Group(worker) for worker in workers]
        async with asyncio.timeout(LIMIT_S):
            errors = await asyncio.gather(
                *(broadcast_state(group, lambda: 1, 0) for group in groups),
                return_exceptions=True,
            )
        assert isinstance(errors[0], UsageError)
        assert isinstance(errors[1], CollectiveError)
        assert "cannot save its state" in str(errors[1])
        with pytest.raises(UsageError, match="source must be"):
            await broadcast_state(groups[0], 1, 2)
