"""Parameters are averaged when it is due, or stay as they are if that fails."""

from __future__ import annotations

import asyncio
import copy
import logging
import pickle
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from asyncrpc import Group, UsageError
from asyncrpc.ddp import (
    HierarchicalModelAverager,
    PeriodicModelAverager,
    PostLocalSGDOptimizer,
    ZeroRedundancyOptimizer,
)
from asyncrpc.errors import CollectiveError
from tests.integration.parallel.ddp.ranks import groups_of, outcomes
from tests.integration.parallel.ddp.sharing import Parameters

Averager = PeriodicModelAverager | HierarchicalModelAverager


@pytest.fixture
async def groups() -> AsyncIterator[list[Group]]:
    async with groups_of(4) as groups:
        yield groups


def of_rank(rank: int, *, shape: tuple[int, ...] = (3, 4)) -> Parameters:
    """Return parameters with gradients: those of rank 2 are full of twos."""
    parameters = [nn.Parameter(torch.full(size, float(rank))) for size in (shape, (2,))]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return parameters


def values(all_: list[Parameters]) -> list[set[float]]:
    """Return what the parameters of each rank are full of."""
    return [{parameter.detach().mean().item() for parameter in mine} for mine in all_]


def averaging(averagers: Sequence[Averager], all_: list[Any]) -> list[Any]:
    pairs = zip(averagers, all_, strict=False)
    return [averager.average_parameters(mine) for averager, mine in pairs]


async def average(averagers: Sequence[Averager], all_: list[Any]) -> None:
    await asyncio.gather(*averaging(averagers, all_))


OWN = [{0.0}, {1.0}, {2.0}, {3.0}]
MEANS = [{1.5}] * 4


class TestPeriods:
    async def test_averaging_begins_after_the_warm_up(
        self, groups: list[Group]
    ) -> None:
        averagers = [PeriodicModelAverager(g, 3, warmup_steps=2) for g in groups]
        for step in range(9):
            all_ = [of_rank(group.rank) for group in groups]
            await average(averagers, all_)
            assert values(all_) == (MEANS if step in {2, 5, 8} else OWN)

    async def test_averaging_periods_have_levels(self, groups: list[Group]) -> None:
        averagers = [
            HierarchicalModelAverager(g, {2: 2, 4: 4, 8: 4}, warmup_steps=1)
            for g in groups
        ]
        pairs = [{0.5}, {0.5}, {2.5}, {2.5}]
        wanted = [OWN, OWN, pairs, OWN, MEANS, OWN, pairs]
        for step in wanted:
            all_ = [of_rank(group.rank) for group in groups]
            await average(averagers, all_)
            assert values(all_) == step
        for averager in averagers:
            averager.close()

    @pytest.mark.parametrize(
        ("levels", "says"),
        [
            ({}, "at least one period"),
            ({0: 2, 2: 4}, r"positive, .* not \[0, 2\]"),
            ({4: 2, 2: 4}, r"not smaller than the one before, not \[4, 2\]"),
            ({2: 4, 4: 2}, r"each size .* not \[4, 2\]"),
            ({2: 3, 4: 4}, r"divide the number of ranks, 4, .* not \[3, 4\]"),
            ({2: 2}, r"the last must be 4, not \[2\]"),
        ],
    )
    async def test_invalid_levels_are_refused(
        self, groups: list[Group], levels: dict[int, int], says: str
    ) -> None:
        with pytest.raises(UsageError, match=says):
            HierarchicalModelAverager(groups[0], levels)

    async def test_invalid_period_or_warm_up_is_refused(
        self, groups: list[Group]
    ) -> None:
        with pytest.raises(UsageError, match="period must be an integer of at least 1"):
            PeriodicModelAverager(groups[0], 0)
        with pytest.raises(UsageError, match="warmup_steps must be an integer"):
            PeriodicModelAverager(groups[0], 2, warmup_steps=-1)

    @pytest.mark.parametrize("levels", [None, {1: 4}])
    async def test_period_of_one_step_warns(
        self,
        groups: list[Group],
        levels: dict[int, int] | None,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        with caplog.at_level(logging.WARNING, "asyncrpc"):
            if levels is None:
                PeriodicModelAverager(groups[0], 1)
            else:
                HierarchicalModelAverager(groups[0], levels)
        assert "costs as much as averaging gradients" in caplog.text


class TestParameters:
    async def test_parameters_with_gradients_are_averaged(
        self, groups: list[Group]
    ) -> None:
        averagers = [PeriodicModelAverager(group, 2) for group in groups]
        all_ = [of_rank(group.rank) for group in groups]
        for mine in all_:
            mine[1].grad = None
        await asyncio.gather(
            *(
                averager.average_parameters([{"params": mine[:1]}, {"params": mine}])
                for averager, mine in zip(averagers, all_, strict=True)
            )
        )
        assert values(all_) == [{1.5, float(rank)} for rank in range(4)]

    async def test_averaging_no_parameters_counts_the_step(
        self, groups: list[Group]
    ) -> None:
        averagers = [PeriodicModelAverager(group, 2) for group in groups]
        await average(averagers, [[]] * 4)
        assert [averager.step for averager in averagers] == [1] * 4

    async def test_integer_parameters_are_refused(self, groups: list[Group]) -> None:
        averagers = [PeriodicModelAverager(group, 2) for group in groups]
        number = torch.ones(3, dtype=torch.int64)
        number.grad = torch.ones(3, dtype=torch.int64)
        for error in await outcomes(
            *(averager.average_parameters([number]) for averager in averagers)
        ):
            assert "parameter 0 has dtype torch.int64" in str(error)

    async def test_different_parameters_are_named(self, groups: list[Group]) -> None:
        averagers = [PeriodicModelAverager(group, 2) for group in groups]
        all_ = [of_rank(group.rank) for group in groups]
        all_[3] = of_rank(3, shape=(4, 3))
        for error in await outcomes(*averaging(averagers, all_)):
            assert type(error) is UsageError
            assert "rank 3 ('d') has 'parameter 0: torch.float32 (4, 3)'" in str(error)
        assert values(all_) == OWN
        all_[3] = of_rank(3)
        await average(averagers, all_)
        assert values(all_) == MEANS

    async def test_averaging_makes_earlier_graphs_stale(
        self, groups: list[Group]
    ) -> None:
        averagers = [PeriodicModelAverager(group, 2) for group in groups]
        all_ = [of_rank(group.rank) for group in groups]
        losses = [mine[0].square().sum() for mine in all_]
        await average(averagers, all_)
        for loss in losses:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                torch.autograd.backward(loss)


class TestFailures:
    async def test_failed_averaging_keeps_parameters_and_step(
        self, groups: list[Group]
    ) -> None:
        averagers = [PeriodicModelAverager(group, 1) for group in groups]
        await average(averagers, [[]] * 4)
        all_ = [of_rank(group.rank, shape=(300, 300)) for group in groups]
        running = [
            asyncio.ensure_future(averager.average_parameters(mine))
            for averager, mine in zip(averagers[:3], all_, strict=False)
        ]
        await asyncio.sleep(0)
        running[1].cancel()
        errors = await outcomes(*running, averagers[3].average_parameters(all_[3]))
        assert type(errors[1]) is asyncio.CancelledError
        for error in (errors[0], *errors[2:]):
            assert isinstance(error, CollectiveError)
            assert "rank 1 ('b')" in str(error)
        assert values(all_) == OWN
        assert [averager.step for averager in averagers] == [1] * 4
        for again in range(3):
            await average(averagers, all_)
            assert averagers[0].step == again + 2
            assert values(all_) == MEANS

    async def test_closed_averager_is_named_to_the_others(
        self, groups: list[Group]
    ) -> None:
        averagers = [PeriodicModelAverager(group, 2) for group in groups]
        all_ = [of_rank(group.rank) for group in groups]
        averagers[2].close()
        errors = await outcomes(*averaging(averagers[:2], all_))
        assert all("rank 2 ('c')" in str(error) for error in errors), errors
        with pytest.raises(UsageError, match="was closed"):
            await averagers[2].average_parameters(all_[2])


class TestOptimizer:
    def make(self, group: Group, **options: Any) -> PostLocalSGDOptimizer:
        local = torch.optim.SGD(of_rank(group.rank), lr=1.0, **options)
        return PostLocalSGDOptimizer(local, PeriodicModelAverager(group, 2))

    async def test_optimizer_steps_then_averages(self, groups: list[Group]) -> None:
        optimizers = [self.make(group) for group in groups]
        all_ = [optimizer.param_groups[0]["params"] for optimizer in optimizers]
        await asyncio.gather(*(optimizer.step() for optimizer in optimizers))
        assert values(all_) == [{0.5}] * 4
        for optimizer in optimizers:
            optimizer.zero_grad()
        await asyncio.gather(*(optimizer.step() for optimizer in optimizers))
        assert [optimizer.averager.step for optimizer in optimizers] == [2] * 4

    async def test_step_returns_the_result_of_its_closure(
        self, groups: list[Group]
    ) -> None:
        optimizers = [self.make(group) for group in groups]

        async def slow() -> float:
            await asyncio.sleep(0)
            return 3.0

        assert (
            await asyncio.gather(*(optimizer.step(slow) for optimizer in optimizers))
            == [3] * 4
        )
        assert (
            await asyncio.gather(
                *(optimizer.step(lambda: 4.0) for optimizer in optimizers)
            )
            == [4.0] * 4
        )

    async def test_optimizer_works_with_schedulers_and_hooks(
        self, groups: list[Group]
    ) -> None:
        optimizers = [self.make(group, momentum=0.9) for group in groups]
        schedulers = [
            torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=6)
            for optimizer in optimizers
        ]
        called = []
        optimizers[0].register_step_post_hook(lambda *_: called.append("stepped"))
        for _ in range(3):
            await asyncio.gather(*(optimizer.step() for optimizer in optimizers))
            for scheduler in schedulers:
                scheduler.step()
        plain = torch.optim.SGD(of_rank(0), lr=1.0, momentum=0.9)
        beside = torch.optim.lr_scheduler.OneCycleLR(plain, max_lr=0.5, total_steps=6)
        for _ in range(3):
            plain.step()
            beside.step()
        assert optimizers[0].param_groups[0]["lr"] == plain.param_groups[0]["lr"]
        assert optimizers[0].defaults == plain.defaults
        assert called == ["stepped"] * 3

    async def test_optimizer_continues_from_a_saved_state(
        self, groups: list[Group], caplog: pytest.LogCaptureFixture
    ) -> None:
        saved = self.make(groups[0], momentum=0.9)
        saved.averager.step = 7
        state = copy.deepcopy(saved.state_dict())
        assert state["step"] == 7
        again = self.make(groups[1], momentum=0.9)
        again.load_state_dict(state)
        assert again.averager.step == 7
        # Schedulers that came before have its groups still.
        assert again.param_groups is again.optim.param_groups
        again.load_state_dict(saved.optim.state_dict())
        assert again.averager.step == 0
        assert "has no `step`" in caplog.text

    async def test_optimizer_takes_parameter_groups(self, groups: list[Group]) -> None:
        optimizer = self.make(groups[0])
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        assert len(optimizer.param_groups) == 2
        assert not optimizer.state
        assert "Parameter Group 1" in repr(optimizer)

    async def test_zero_redundancy_optimizer_is_refused(
        self, groups: list[Group]
    ) -> None:
        zero = ZeroRedundancyOptimizer(of_rank(0), torch.optim.SGD, groups[0], lr=1.0)
        with pytest.raises(UsageError, match="need no averaging"):
            PostLocalSGDOptimizer(zero, PeriodicModelAverager(groups[0], 2))

    async def test_optimizer_cannot_be_copied(self, groups: list[Group]) -> None:
        optimizer = self.make(groups[0])
        with pytest.raises(UsageError, match="state_dict"):
            copy.deepcopy(optimizer)
        with pytest.raises(UsageError, match="state_dict"):
            pickle.dumps(optimizer)
