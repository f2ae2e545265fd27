"""A PowerSGD state that was saved goes on as if it had not been."""

from __future__ import annotations

import asyncio
import copy
import io
import logging
import pickle
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from asyncrpc import Group, UsageError
from asyncrpc.ddp import (
    DistributedDataParallel,
    GradBucket,
    PowerSGDState,
    batched_powerSGD_hook,
    fp16_compress_wrapper,
    powerSGD_hook,
)
from asyncrpc.parallel.ddp.hooks.states import bound
from asyncrpc.testing import Cluster

Hook = Callable[[PowerSGDState, GradBucket], Awaitable[torch.Tensor]]
Numbers = tuple[tuple[int, ...], ...]

SHAPES = [(12,), (12, 20), (20, 3, 5), (20,), (12, 20), (9, 14)]
LAYOUT: Numbers = ((5, 4, 3), (2, 1, 0))
OTHER: Numbers = ((5,), (0, 4, 2, 3), (1,))
HOOKS = {
    "layers": powerSGD_hook,
    "batched": batched_powerSGD_hook,
    "fp16": fp16_compress_wrapper(powerSGD_hook),
}
OPTIONS: dict[str, Any] = {
    "start_powerSGD_iter": 2,
    "min_compression_rate": 1,
    "matrix_approximation_rank": 2,
    "random_seed": 3,
}


class Rank:
    """One rank: a group, parameters of its own, and a state."""

    def __init__(self, group: Group, state: PowerSGDState) -> None:
        self.group = group
        self.parameters = [torch.empty(shape) for shape in SHAPES]
        self.state: PowerSGDState = bound(state, group, self.parameters)

    async def step(
        self, hook: Hook, number: int, layout: Numbers = LAYOUT, *, same: bool = False
    ) -> list[torch.Tensor]:
        """Make a step; return the gradient of each parameter."""
        gradients: dict[int, torch.Tensor] = {}
        for index, numbers in enumerate(layout):
            own = [self.gradient(number, place, same=same) for place in numbers]
            bucket = GradBucket(
                index,
                torch.cat(own),
                [self.parameters[number] for number in numbers],
                is_last=index == len(layout) - 1,
            )
            bucket.set_buffer(await hook(self.state, bucket))
            gradients |= dict(zip(numbers, bucket.gradients(), strict=True))
        return [gradients[place] for place in range(len(SHAPES))]

    def gradient(self, step: int, parameter: int, *, same: bool) -> torch.Tensor:
        seed = 1000 * step + 10 * parameter + (0 if same else self.group.rank)
        numel = self.parameters[parameter].numel()
        return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


async def steps(
    ranks: Sequence[Rank], hook: Hook, numbers: range, **how: Any
) -> list[list[torch.Tensor]]:
    """Make steps at all ranks; return what rank 0 has of each; all have the same."""
    gradients = []
    for number in numbers:
        each = await asyncio.gather(*(rank.step(hook, number, **how) for rank in ranks))
        for other in each[1:]:
            assert same(each[0], other)
        gradients.append(each[0])
    return gradients


def same(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(left, right, strict=True))


def ranks_of(workers: Sequence[Any], name: str, **options: Any) -> list[Rank]:
    return [
        Rank(Group(worker, name=name), PowerSGDState(None, **{**OPTIONS, **options}))
        for worker in workers
    ]


def loaded(ranks: Sequence[Rank], states: Sequence[PowerSGDState]) -> list[Rank]:
    return [Rank(rank.group, state) for rank, state in zip(ranks, states, strict=True)]


def by_pickle(state: PowerSGDState) -> PowerSGDState:
    restored = pickle.loads(pickle.dumps(state))
    assert isinstance(restored, PowerSGDState)
    return restored


def by_torch(state: PowerSGDState) -> PowerSGDState:
    memory = io.BytesIO()
    torch.save({"hook": state}, memory)
    memory.seek(0)
    with torch.serialization.safe_globals([PowerSGDState]):
        restored = torch.load(memory, weights_only=True)["hook"]
    assert isinstance(restored, PowerSGDState)
    return restored


def by_values(state: PowerSGDState) -> PowerSGDState:
    memory = io.BytesIO()
    torch.save(state.state_dict(), memory)
    memory.seek(0)
    power_sgdstate = PowerSGDState(None)
    power_sgdstate.load_state_dict(torch.load(memory, weights_only=True))
    return power_sgdstate


WAYS = [by_pickle, by_torch, by_values, copy.deepcopy]


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("at", [1, 2, 4])  # before it compresses, when it begins, later
async def test_saved_state_continues_bitwise(
    hook: str, way: Callable[[PowerSGDState], PowerSGDState], at: int
) -> None:
    async with Cluster(2) as workers:
        ranks = ranks_of(workers, "all")
        await steps(ranks, HOOKS[hook], range(at))
        others = loaded(ranks, [way(rank.state) for rank in ranks])
        wanted = await steps(ranks, HOOKS[hook], range(at, 7))
        results = await steps(others, HOOKS[hook], range(at, 7))
        assert all(map(same, results, wanted))
        assert others[0].state.iter == 7
        stats = others[0].state.compression_stats()
        assert stats == ranks[0].state.compression_stats()
        assert stats.rate > 1


@pytest.mark.parametrize(
    "options", [{"use_error_feedback": False}, {"warm_start": False}]
)
async def test_saved_state_continues_without_errors_or_qs(
    options: dict[str, Any],
) -> None:
    async with Cluster(2) as workers:
        ranks = ranks_of(workers, "all", **options)
        await steps(ranks, powerSGD_hook, range(4))
        others = loaded(ranks, [by_pickle(rank.state) for rank in ranks])
        wanted = await steps(ranks, powerSGD_hook, range(4, 7))
        assert all(map(same, await steps(others, powerSGD_hook, range(4, 7)), wanted))
        state = ranks[0].state
        assert (len(state.error_dict), len(state.q_memory_dict)) == (
            2 * state.use_error_feedback,
            2 * bool(state.warm_start),
        )


async def test_saved_state_continues_bitwise_in_other_buckets() -> None:
    """Errors and Qs belong to parameters: their buckets may be cut anew."""
    async with Cluster(2) as workers:
        ranks = ranks_of(workers, "all")
        await steps(ranks, powerSGD_hook, range(5))
        others = loaded(ranks, [by_pickle(rank.state) for rank in ranks])
        wanted = await steps(ranks, powerSGD_hook, range(5, 8))
        # As when a module is made anew: its buckets are cut once more after a step.
        results = await steps(others, powerSGD_hook, range(5, 6), layout=OTHER)
        results += await steps(others, powerSGD_hook, range(6, 8))
        assert all(map(same, results, wanted))


async def test_batched_errors_move_into_other_buckets() -> None:
    async with Cluster(2) as workers:
        ranks = ranks_of(workers, "all")
        await steps(ranks, batched_powerSGD_hook, range(5))
        state = ranks[0].state
        before = torch.cat([state.error_dict[0][: 126 + 240 + 20]])
        bucket = GradBucket(
            0, torch.zeros(126), [ranks[0].parameters[5]], is_last=False
        )
        state.begin(bucket)
        errors = state.error_for(bucket, 144)
        assert errors is not None
        assert torch.equal(errors[:126], before[:126])
        assert (errors[126:] == 0).all()


async def test_the_mean_of_all_errors_is_enough_for_any_number_of_ranks() -> None:
    async with Cluster(4) as four, Cluster(2) as two:
        ranks = ranks_of(four, "all")
        await steps(ranks, powerSGD_hook, range(5))
        plainly = loaded(ranks, [copy.deepcopy(rank.state) for rank in ranks])
        await asyncio.gather(*(rank.state.average_errors() for rank in ranks))
        saved = pickle.dumps(ranks[2].state)
        fewer = [Rank(Group(worker), pickle.loads(saved)) for worker in two]
        every = loaded(ranks, [pickle.loads(saved) for _ in ranks])
        # The means of the gradients are the same, as all ranks have the same ones.
        wanted = await steps(plainly, powerSGD_hook, range(5, 9), same=True)
        went_on = await steps(ranks, powerSGD_hook, range(5, 9), same=True)
        assert all(
            map(
                same, await steps(every, powerSGD_hook, range(5, 9), same=True), went_on
            )
        )
        resumed = await steps(fewer, powerSGD_hook, range(5, 9), same=True)
        for others in (went_on, resumed):
            for left, right in zip(others, wanted, strict=True):
                for gradient, expected in zip(left, right, strict=True):
                    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5)


async def test_state_of_a_single_rank_does_not_fit_all_ranks() -> None:
    """Each rank saves its own errors, or their mean is saved."""
    async with Cluster(2) as workers:
        ranks = ranks_of(workers, "all")
        await steps(ranks, powerSGD_hook, range(5))
        others = loaded(ranks, [by_pickle(ranks[0].state) for _ in ranks])
        (wanted,) = await steps(ranks, powerSGD_hook, range(5, 6))
        (restored,) = await steps(others, powerSGD_hook, range(5, 6))
        assert not torch.allclose(restored[1], wanted[1], rtol=1e-2, atol=1e-2)


async def test_a_state_of_another_module_is_refused() -> None:
    async with Cluster(1) as workers:
        (rank,) = ranks_of(workers, "all")
        await rank.step(powerSGD_hook, 0)
        await rank.step(powerSGD_hook, 1)
        await rank.step(powerSGD_hook, 2)
        state = by_pickle(rank.state)
        smaller = [torch.empty(2) for _ in SHAPES]
        bound(state, rank.group, smaller)
        for layout in ((5, 4, 3), (4, 5)):
            bucket = GradBucket(
                0,
                torch.zeros(2 * len(layout)),
                [smaller[number] for number in layout],
                is_last=False,
            )
            with pytest.raises(UsageError, match="another module"):
                await powerSGD_hook(state, bucket)


async def test_pickled_state_warns_that_its_group_is_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with Cluster(1) as workers:
        group = Group(workers[0])
        state = PowerSGDState(group)
        assert state.group is group
        with caplog.at_level(logging.WARNING, "asyncrpc"):
            saved = pickle.dumps(state)
            assert "without its group" in caplog.text
            caplog.clear()
            restored = pickle.loads(saved)
            assert "process_group" in caplog.text
        assert restored.process_group is None
        with pytest.raises(UsageError, match="has no group"):
            _ = restored.group
        restored.process_group = group
        assert restored.group is group


class Crossed(nn.Module):
    """Its layers are used in another order than they are listed."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(24, 12)
        self.first = nn.Linear(24, 24)
        self.middle = nn.Linear(24, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.middle(self.first(x).tanh()).tanh())
        return result


class Trainer:
    """A module at one rank, in small buckets, with a hook and an optimizer."""

    def __init__(self, group: Group, state: PowerSGDState) -> None:
        torch.manual_seed(0)
        self.group, self.state = group, state
        self.model = DistributedDataParallel(
            Crossed(), group, bucket_cap_mb=0.004, first_bucket_cap_mb=0.001
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)

    async def train(self, steps: range, hook: Hook) -> list[float]:
        await self.model
        self.model.register_comm_hook(self.state, hook)
        losses = []
        for step in steps:
            draw = torch.Generator().manual_seed(100 * step + self.group.rank)
            loss = self.model(torch.randn(8, 24, generator=draw)).square().mean()
            self.optimizer.zero_grad()
            await self.model.backward(loss)
            self.optimizer.step()
            losses.append(loss.item())
        self.model.close()
        return losses

    def saved(self) -> bytes:
        model, optimizer = self.model.module.state_dict(), self.optimizer.state_dict()
        return pickle.dumps((model, optimizer, self.state))

    @classmethod
    def load(cls, group: Group, saved: bytes) -> Trainer:
        model, optimizer, state = pickle.loads(saved)
        trainer = cls(group, state)
        trainer.model.module.load_state_dict(model)
        trainer.optimizer.load_state_dict(optimizer)
        return trainer


async def test_new_module_continues_bitwise_from_a_state() -> None:
    """The buckets differ at first: they are rebuilt after the first step."""
    layouts = []

    async def resume(group: Group) -> None:
        state = PowerSGDState(None, **OPTIONS)
        first = Trainer(group, state)
        layouts.append(first.model.statistics().bucket_bytes)
        await first.train(range(6), powerSGD_hook)
        layouts.append(first.model.statistics().bucket_bytes)
        saved = first.saved()
        wanted = await Trainer.load(group, saved).train(range(6, 12), powerSGD_hook)
        # The first is itself a new module: so compare with one that is not.
        whole = Trainer(group, PowerSGDState(None, **OPTIONS))
        losses = await whole.train(range(12), powerSGD_hook)
        assert losses[6:] == wanted

    async with Cluster(2) as workers:
        await asyncio.gather(*(resume(Group(worker)) for worker in workers))
    assert layouts[0] != layouts[-1]
