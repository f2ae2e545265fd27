"""Ranks with fewer inputs go on with the others, and come to the same parameters."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import torch
from torch import nn

from asyncrpc import Group, UsageError
from asyncrpc.ddp import (
    Join,
    PeriodicModelAverager,
    PostLocalSGDOptimizer,
    ZeroRedundancyOptimizer,
)
from asyncrpc.errors import CollectiveError
from tests.integration.parallel.ddp.ranks import (
    Mlp,
    Model,
    at_all,
    grads_of,
    groups_of,
    loss_of,
    outcomes,
    rows,
    wrapped,
)

INPUTS = (1, 4, 2)  # of each rank
RATE = 0.1


@pytest.fixture
async def groups() -> AsyncIterator[list[Group]]:
    async with groups_of(len(INPUTS)) as groups:
        yield groups


def make() -> nn.Module:
    return nn.Sequential(Mlp(), nn.BatchNorm1d(3))


async def train(rank: int, model: Model, **options: Any) -> None:
    async with model.join(**options):
        for step in range(INPUTS[rank]):
            model.zero_grad()
            await model.backward(loss_of(model(rows(rank, step))))
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.sub_(RATE * parameter.grad)


def trained_here(*, divides_by_all: bool) -> nn.Module:
    """Train in one process as the ranks should together."""
    module = Mlp()
    for step in range(max(INPUTS)):
        there = [rank for rank, count in enumerate(INPUTS) if step < count]
        module.zero_grad()
        for rank in there:
            count = len(INPUTS) if divides_by_all else len(there)
            torch.autograd.backward(loss_of(module(rows(rank, step))).div(count))
        with torch.no_grad():
            for parameter in module.parameters():
                assert parameter.grad is not None
                parameter.sub_(RATE * parameter.grad)
    return module


@pytest.mark.parametrize("divides_by_all", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_as_bucket_view": False},
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"bucket_cap_mb": 1e-4, "first_bucket_cap_mb": 1e-4},
    ],
)
async def test_uneven_ranks_reach_the_same_parameters(
    groups: list[Group],
    options: dict[str, Any],
    divides_by_all: bool,  # noqa: FBT001
) -> None:
    models = await wrapped(groups, Mlp, **options)
    await at_all(
        models,
        lambda rank, model: train(
            rank, model, divide_by_initial_world_size=divides_by_all
        ),
    )
    wanted = trained_here(divides_by_all=divides_by_all)
    for model in models:
        for mine, other in zip(model.parameters(), wanted.parameters(), strict=True):
            assert torch.allclose(mine, other, atol=1e-6)
    first, *rest = (model.module.state_dict() for model in models)
    assert all(
        torch.equal(first[name], state[name]) for state in rest for name in first
    )


async def test_join_may_be_repeated_with_passes_in_between(groups: list[Group]) -> None:
    models = await wrapped(groups, make)

    async def run(rank: int, model: Model) -> None:
        await train(rank, model)
        await model.backward(loss_of(model(rows(rank))))
        await train(rank, model)

    await at_all(models, run)
    first, *rest = (model.module.state_dict() for model in models)
    assert all(
        torch.equal(first[name], state[name]) for state in rest for name in first
    )


async def test_buffers_come_from_a_rank_with_inputs(groups: list[Group]) -> None:
    models = await wrapped(groups, make)
    await at_all(models, train)
    # Rank 1 has seen all four steps.
    for model in models:
        assert model.module.get_buffer("1.num_batches_tracked") == max(INPUTS)


async def test_first_rank_without_inputs_may_end_the_join(groups: list[Group]) -> None:
    models = await wrapped(groups, Mlp)
    errors = await outcomes(
        *(
            train(rank, model, throw_on_early_termination=True)
            for rank, model in enumerate(models)
        )
    )
    for error in errors:
        assert isinstance(error, UsageError)
        assert "rank 0 ('a') has no more inputs" in str(error)


async def test_rank_that_raises_fails_the_join_of_the_others(
    groups: list[Group],
) -> None:
    models = await wrapped(groups, Mlp)

    async def run(rank: int, model: Model) -> None:
        if rank != 1:
            await train(rank, model)
            return
        async with model.join():
            raise ArithmeticError("no input today")

    errors = await outcomes(*(run(rank, model) for rank, model in enumerate(models)))
    assert isinstance(errors[1], ArithmeticError)
    for error in (errors[0], errors[2]):
        assert isinstance(error, CollectiveError)
        assert "rank 1 ('b')" in str(error)
    await at_all(models, train)
    assert grads_of(models[1])


async def test_nested_join_is_refused(groups: list[Group]) -> None:
    (model, *_) = await wrapped(groups, Mlp)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(model.close)
        await model.join().__aenter__()
        with pytest.raises(UsageError, match="within a `join`"):
            await stack.enter_async_context(model.join())


def zero_of(model: Model) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, model.group, lr=RATE, momentum=0.9
    )


def local_of(model: Model) -> PostLocalSGDOptimizer:
    return PostLocalSGDOptimizer(
        torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9),
        PeriodicModelAverager(model.group, 2),
    )


async def train_by(
    rank: int, model: Model, make_optimizer: Callable[[Model], Any], **options: bool
) -> None:
    optimizer = make_optimizer(model)
    async with Join([model, optimizer], **options):
        for step in range(INPUTS[rank]):
            optimizer.zero_grad()
            await model.backward(loss_of(model(rows(rank, step))))
            await optimizer.step()


class TestOptimizersWhoseStepsWait:
    @pytest.mark.parametrize("divides_by_all", [True, False])
    @pytest.mark.parametrize("as_view", [True, False])
    @pytest.mark.parametrize("make_optimizer", [zero_of, local_of])
    async def test_waiting_optimizer_steps_match_one_rank(
        self,
        groups: list[Group],
        make_optimizer: Callable[[Model], Any],
        as_view: bool,  # noqa: FBT001
        divides_by_all: bool,  # noqa: FBT001
    ) -> None:
        models = await wrapped(groups, Mlp, gradient_as_bucket_view=as_view)

        async def run(rank: int, model: Model) -> None:
            options = {"divide_by_initial_world_size": divides_by_all}
            await train_by(rank, model, make_optimizer, **options)

        await at_all(models, run)
        alone = Mlp()
        optimizer = torch.optim.SGD(alone.parameters(), lr=RATE, momentum=0.9)
        for step in range(max(INPUTS)):
            there = [rank for rank, count in enumerate(INPUTS) if step < count]
            optimizer.zero_grad()
            for rank in there:
                count = len(INPUTS) if divides_by_all else len(there)
                torch.autograd.backward(loss_of(alone(rows(rank, step))).div(count))
            optimizer.step()
        for model in models:
            for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
                assert torch.allclose(mine, other, atol=1e-6)

    @pytest.mark.parametrize("make_optimizer", [zero_of, local_of])
    async def test_optimizer_outside_the_join_is_refused(
        self, groups: list[Group], make_optimizer: Callable[[Model], Any]
    ) -> None:
        models = await wrapped(groups, Mlp)

        async def run(rank: int, model: Model) -> None:
            optimizer = make_optimizer(model)
            async with model.join():
                for step in range(INPUTS[rank]):
                    await model.backward(loss_of(model(rows(rank, step))))
                    await optimizer.step()

        for error in await outcomes(*(run(r, m) for r, m in enumerate(models))):
            assert isinstance(error, UsageError | CollectiveError)
            assert "Join([model, optimizer])" in str(error)

    async def test_different_order_of_joinables_is_named(
        self, groups: list[Group]
    ) -> None:
        models = await wrapped(groups, Mlp)

        async def run(rank: int, model: Model) -> None:
            optimizer = zero_of(model)
            async with Join([model, optimizer]):
                await model.backward(loss_of(model(rows(rank))))
                if rank == 1:
                    await model.backward(loss_of(model(rows(rank))))
                await optimizer.step()

        for error in await outcomes(*(run(r, m) for r, m in enumerate(models))):
            assert isinstance(error, UsageError)
            assert "rank 0 begins a step of joinables[1], and rank 1 of" in str(error)

    async def test_failed_optimizer_ends_the_join_on_every_rank(
        self, groups: list[Group]
    ) -> None:
        models = await wrapped(groups, Mlp)

        class Failing(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                raise ArithmeticError("no step today")

        async def run(rank: int, model: Model) -> None:
            kind = Failing if rank == 1 else torch.optim.SGD
            optimizer = ZeroRedundancyOptimizer(
                model.parameters(), kind, model.group, lr=RATE
            )
            async with Join([model, optimizer]):
                for step in range(INPUTS[rank]):
                    await model.backward(loss_of(model(rows(rank, step))))
                    await optimizer.step()

        errors = await outcomes(*(run(r, m) for r, m in enumerate(models)))
        assert all(isinstance(error, UsageError | CollectiveError) for error in errors)

    async def test_join_needs_a_module(self, groups: list[Group]) -> None:
        (model, *_) = await wrapped(groups, Mlp)
        with pytest.raises(UsageError, match="must contain a DistributedDataParallel"):
            Join([zero_of(model)])
        plain = torch.optim.SGD(model.parameters(), lr=RATE)
        with pytest.raises(UsageError, match=r"joinables\[1\] must be"):
            Join([model, plain])


async def test_a_closure_within_a_join_is_refused(groups: list[Group]) -> None:
    models = await wrapped(groups, Mlp)

    async def run(rank: int, model: Model) -> None:
        optimizer = zero_of(model)
        async with Join([model, optimizer]):
            await optimizer.step(lambda: torch.zeros(()))

    for error in await outcomes(*(run(r, m) for r, m in enumerate(models))):
        assert isinstance(error, UsageError)
        assert "closure cannot be used within a `Join`" in str(error)
