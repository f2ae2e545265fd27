"""Parameters are averaged when it is due, or stay as they are if that fails."""

from __future__ import annotations

import asyncio
import copy
import logging
import pickle
from collections.abc import AsyncIterator
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


@pytest.fixture
async def groups() -> AsyncIterator[list[Group]]:
    async with groups_of(4) as groups:
        yield groups


def of_rank(rank: int, *, shape: tuple[int, ...] = (3, 4)) -> Parameters:
    """Return parameters with gradients: those of rank 2 are full of twos."""
    found = [nn.Parameter(torch.full(size, float(rank))) for size in (shape, (2,))]
    for one in found:
        one.grad = torch.ones_like(one)
    return found


def values(all_: list[Parameters]) -> list[set[float]]:
    """Return what the parameters of each rank are full of."""
    return [{one.detach().mean().item() for one in mine} for mine in all_]


OWN = [{0.0}, {1.0}, {2.0}, {3.0}]
MEANS = [{1.5}] * 4


class TestPeriods:
    async def test_begin_after_the_warm_up(self, groups: list[Group]) -> None:
        averagers = [PeriodicModelAverager(g, 3, warmup_steps=2) for g in groups]
        for step in range(9):
            all_ = [of_rank(group.rank) for group in groups]
            await asyncio.gather(
                *(
                    averager.average_parameters(mine)
                    for averager, mine in zip(averagers, all_, strict=True)
                )
            )
            assert values(all_) == (MEANS if step in {2, 5, 8} else OWN)

    async def test_have_levels(self, groups: list[Group]) -> None:
        averagers = [
            HierarchicalModelAverager(g, {2: 2, 4: 4, 8: 4}, warmup_steps=1)
            for g in groups
        ]
        pairs = [{0.5}, {0.5}, {2.5}, {2.5}]
        wanted = [OWN, OWN, pairs, OWN, MEANS, OWN, pairs]
        for step in wanted:
            all_ = [of_rank(group.rank) for group in groups]
            await asyncio.gather(
                *(
                    averager.average_parameters(mine)
                    for averager, mine in zip(averagers, all_, strict=True)
                )
            )
            assert values(all_) == step
        for averager in averagers:
            averager.close()

    @pytest.mark.parametrize(
        ("levels", "says"),
        [
            ({}, "at least one period"),
            ({0: 2, 2: 4}, r"positive, .* not \[0, 2\]"),
            (
                {4: 2, 2: 4},
                r"not smaller than the one before, not \[4, 2\]",
            ),
            ({2: 4, 4: 2}, r"each size .* not \[4, 2\]"),
            ({2: 3, 4: 4}, r"divide the number of ranks, 4, .* not \[3, 4\]"),
            ({2: 2}, r"the last must be 4, not \[2\]"),
        ],
    )
    async def test_that_make_no_sense_are_refused(
        self, groups: list[Group], levels: dict[int, int], says: str
    ) -> None:
        with pytest.raises(UsageError, match=says):
            HierarchicalModelAverager(groups[0], levels)

    async def test_or_numbers_of_steps(self, groups: list[Group]) -> None:
        with pytest.raises(UsageError, match="period must be an integer of at least 1"):
            PeriodicModelAverager(groups[0], 0)
        with pytest.raises(UsageError, match="warmup_steps must be an integer"):
            PeriodicModelAverager(groups[0], 2, warmup_steps=-1)

    @pytest.mark.parametrize("levels", [None, {1: 4}])
    async def test_of_one_step_are_warned_of(
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
    async def test_are_those_with_gradients(self, groups: list[Group]) -> None:
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

    async def test_may_be_none(self, groups: list[Group]) -> None:
        averagers = [PeriodicModelAverager(group, 2) for group in groups]
        await asyncio.gather(*(one.average_parameters([]) for one in averagers))
        assert [one.step for one in averagers] == [1] * 4

    async def test_without_means_are_refused(self, groups: list[Group]) -> None:
        averagers = [PeriodicModelAverager(group, 2) for group in groups]
        number = torch.ones(3, dtype=torch.int64)
        number.grad = torch.ones(3, dtype=torch.int64)
        for error in await outcomes(
            *(one.average_parameters([number]) for one in averagers)
        ):
            assert "parameter 0 has dtype torch.int64" in str(error)

    async def test_that_differ_are_named(self, groups: list[Group]) -> None:
        averagers = [PeriodicModelAverager(group, 2) for group in groups]
        all_ = [of_rank(group.rank) for group in groups]
        all_[3] = of_rank(3, shape=(4, 3))
        for error in await outcomes(
            *(
                averager.average_parameters(mine)
                for averager, mine in zip(averagers, all_, strict=True)
            )
        ):
            assert type(error) is UsageError
            assert "rank 3 ('d') has 'parameter 0: torch.float32 (4, 3)'" in str(error)
        assert values(all_) == OWN
        all_[3] = of_rank(3)
        await asyncio.gather(
            *(
                averager.average_parameters(mine)
                for averager, mine in zip(averagers, all_, strict=True)
            )
        )
        assert values(all_) == MEANS

    async def test_make_a_graph_of_before_stale(self, groups: list[Group]) -> None:
        averagers = [PeriodicModelAverager(group, 2) for group in groups]
        all_ = [of_rank(group.rank) for group in groups]
        losses = [mine[0].square().sum() for mine in all_]
        await asyncio.gather(
            *(
                averager.average_parameters(mine)
                for averager, mine in zip(averagers, all_, strict=True)
            )
        )
        for loss in losses:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                torch.autograd.backward(loss)


class TestFailures:
    async def test_leave_parameters_and_step(self, groups: list[Group]) -> None:
        averagers = [PeriodicModelAverager(group, 1) for group in groups]
        await asyncio.gather(*(one.average_parameters([]) for one in averagers))
        all_ = [of_rank(group.rank, shape=(300, 300)) for group in groups]
        running = [
            asyncio.ensure_future(averager.average_parameters(mine))
            for averager, mine in zip(averagers[:3], all_, strict=False)
        ]
        await asyncio.sleep(0)
        running[1].cancel()
        found = await outcomes(
            *running,
            averagers[3].average_parameters(all_[3]),
        )
        assert type(found[1]) is asyncio.CancelledError
        for error in (found[0], *found[2:]):
            assert isinstance(error, CollectiveError)
            assert "rank 1 ('b')" in str(error)
        assert values(all_) == OWN
        assert [one.step for one in averagers] == [1] * 4
        for again in range(3):
            await asyncio.gather(
                *(
                    averager.average_parameters(mine)
                    for averager, mine in zip(averagers, all_, strict=True)
                )
            )
            assert averagers[0].step == again + 2
            assert values(all_) == MEANS

    async def test_of_a_rank_that_closes_name_it(self, groups: list[Group]) -> None:
        averagers = [PeriodicModelAverager(group, 2) for group in groups]
        all_ = [of_rank(group.rank) for group in groups]
        averagers[2].close()
        found = await outcomes(
            *(
                averager.average_parameters(mine)
                for averager, mine in zip(averagers[:2], all_, strict=False)
            )
        )
        assert all("rank 2 ('c')" in str(error) for error in found), found
        with pytest.raises(UsageError, match="was closed"):
            await averagers[2].average_parameters(all_[2])


class TestOptimizer:
    def make(self, group: Group, **options: Any) -> PostLocalSGDOptimizer:
        local = torch.optim.SGD(of_rank(group.rank), lr=1.0, **options)
        return PostLocalSGDOptimizer(local, PeriodicModelAverager(group, 2))

    async def test_steps_and_then_averages(self, groups: list[Group]) -> None:
        optimizers = [self.make(group) for group in groups]
        all_ = [one.param_groups[0]["params"] for one in optimizers]
        await asyncio.gather(*(one.step() for one in optimizers))
        assert values(all_) == [{0.5}] * 4
        for one in optimizers:
            one.zero_grad()
        await asyncio.gather(*(one.step() for one in optimizers))
        assert [one.averager.step for one in optimizers] == [2] * 4

    async def test_gives_what_a_closure_returns(self, groups: list[Group]) -> None:
        optimizers = [self.make(group) for group in groups]

        async def slow() -> float:
            await asyncio.sleep(0)
            return 3.0

        assert await asyncio.gather(*(one.step(slow) for one in optimizers)) == [3] * 4
        assert (
            await asyncio.gather(*(one.step(lambda: 4.0) for one in optimizers))
            == [4.0] * 4
        )

    async def test_is_one_for_schedulers_and_hooks(self, groups: list[Group]) -> None:
        optimizers = [self.make(group, momentum=0.9) for group in groups]
        schedulers = [
            torch.optim.lr_scheduler.OneCycleLR(one, max_lr=0.5, total_steps=6)
            for one in optimizers
        ]
        called = []
        optimizers[0].register_step_post_hook(lambda *_: called.append("stepped"))
        for _ in range(3):
            await asyncio.gather(*(one.step() for one in optimizers))
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

    async def test_goes_on_where_it_was_saved(
        self, groups: list[Group], caplog: pytest.LogCaptureFixture
    ) -> None:
        one = self.make(groups[0], momentum=0.9)
        one.averager.step = 7
        state = copy.deepcopy(one.state_dict())
        assert state["step"] == 7
        again = self.make(groups[1], momentum=0.9)
        again.load_state_dict(state)
        assert again.averager.step == 7
        # Schedulers that came before have its groups still.
        assert again.param_groups is again.optim.param_groups
        again.load_state_dict(one.optim.state_dict())
        assert again.averager.step == 0
        assert "has no `step`" in caplog.text

    async def test_takes_in_groups(self, groups: list[Group]) -> None:
        one = self.make(groups[0])
        one.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        assert len(one.param_groups) == 2
        assert not one.state
        assert "Parameter Group 1" in repr(one)

    async def test_refuses_what_is_kept_together_already(
        self, groups: list[Group]
    ) -> None:
        zero = ZeroRedundancyOptimizer(of_rank(0), torch.optim.SGD, groups[0], lr=1.0)
        with pytest.raises(UsageError, match="need no averaging"):
            PostLocalSGDOptimizer(zero, PeriodicModelAverager(groups[0], 2))

    async def test_cannot_be_copied(self, groups: list[Group]) -> None:
        one = self.make(groups[0])
        with pytest.raises(UsageError, match="state_dict"):
            copy.deepcopy(one)
        with pytest.raises(UsageError, match="state_dict"):
            pickle.dumps(one)
