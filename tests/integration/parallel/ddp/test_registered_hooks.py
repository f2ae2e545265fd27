"""A hook of a module: what it is given, what may be one, and how it fails."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks

from asyncrpc import Group, UsageError
from asyncrpc.ddp import GradBucket, HookState
from asyncrpc.errors import CollectiveError
from tests.integration.parallel.ddp.ranks import (
    Mlp,
    Model,
    at_all,
    grads_of,
    groups_of,
    identical,
    loss_of,
    mean_grads,
    outcomes,
    rows,
    same,
    wrapped,
)

SMALL = {"bucket_cap_mb": 1e-4, "first_bucket_cap_mb": 1e-4}  # one parameter each


@pytest.fixture
async def groups() -> AsyncIterator[list[Group]]:
    async with groups_of(2) as groups:
        yield groups


async def backward(rank: int, model: Model, step: int = 0) -> None:
    await model.backward(loss_of(model(rows(rank, step))))


async def mean(state: Group, bucket: GradBucket) -> torch.Tensor:
    return await state.all_reduce(bucket.buffer(), "avg")


async def mean_elsewhere(state: Group, bucket: GradBucket) -> torch.Tensor:
    """The result is in memory, and of a dtype, of its own."""
    return await state.all_reduce(bucket.buffer().double(), "avg")


async def mean_of_parts(state: Group, bucket: GradBucket) -> torch.Tensor:
    for gradient in bucket.gradients():
        await state.all_reduce(gradient, "avg")
    return bucket.buffer()


async def mean_by_another_buffer(state: Group, bucket: GradBucket) -> torch.Tensor:
    bucket.set_buffer(bucket.buffer().clone())
    return await mean(state, bucket)


class Called:
    """An object that is a hook."""

    async def __call__(self, state: Group, bucket: GradBucket) -> torch.Tensor:
        return await mean(state, bucket)


@pytest.mark.parametrize(
    "hook", [mean, mean_elsewhere, mean_of_parts, mean_by_another_buffer, Called()]
)
@pytest.mark.parametrize(
    "options", [{}, SMALL, {"gradient_as_bucket_view": False}, {"static_graph": True}]
)
async def test_hook_gives_the_gradients(
    groups: list[Group], hook: Any, options: dict[str, Any]
) -> None:
    models = await wrapped(groups, Mlp, **options)
    for model in models:
        model.register_comm_hook(None, hook)

    async def run(rank: int, model: Model) -> None:
        for step in range(3):
            model.zero_grad()
            await backward(rank, model, step)

    await at_all(models, run)
    assert same(grads_of(models[0]), mean_grads(Mlp, 2, 2))
    assert identical([grads_of(model) for model in models])


async def test_hook_gets_each_bucket_once_and_knows_the_last(
    groups: list[Group],
) -> None:
    seen: list[list[GradBucket]] = [[], []]

    async def look(state: list[GradBucket], bucket: GradBucket) -> torch.Tensor:
        state.append(bucket)
        return bucket.buffer()

    models = await wrapped(groups, Mlp, **SMALL)
    for model, state in zip(models, seen, strict=True):
        model.register_comm_hook(state, look)
    await at_all(models, backward)
    for state, model in zip(seen, models, strict=True):
        assert [bucket.index() for bucket in state] == list(range(len(state)))
        last = [bucket.is_last() for bucket in state]
        assert last == [*[False] * (len(state) - 1), True]
        parameters = {id(tensor) for bucket in state for tensor in bucket.parameters()}
        assert parameters == {id(tensor) for tensor in model.parameters()}
        for bucket in state:
            shapes = [tensor.shape for tensor in bucket.parameters()]
            assert [tensor.shape for tensor in bucket.gradients()] == shapes
            assert sum(map(torch.Size.numel, shapes)) == bucket.buffer().numel()


async def test_state_gets_the_group_of_the_module(groups: list[Group]) -> None:
    async def hook(state: HookState, bucket: GradBucket) -> torch.Tensor:
        return await mean(state.group, bucket)

    models, states = await wrapped(groups, Mlp), [HookState(None), HookState(None)]
    for model, state in zip(models, states, strict=True):
        model.register_comm_hook(state, hook)
    await at_all(models, backward)
    assert same(grads_of(models[0]), mean_grads(Mlp, 2))


class TestThoseOfTorch:
    async def test_torch_hook_may_return_a_future(self, groups: list[Group]) -> None:
        models = await wrapped(groups, Mlp, **SMALL)
        for model in models:
            model.register_comm_hook(None, debugging_hooks.noop_hook)
        await at_all(models, backward)
        for rank, model in enumerate(models):
            alone = Mlp()
            torch.autograd.backward(loss_of(alone(rows(rank))))
            assert same(grads_of(model), grads_of(alone))

    async def test_torch_hook_may_return_a_chained_future_of_a_list(
        self, groups: list[Group]
    ) -> None:
        def double(_: object, bucket: GradBucket) -> Any:
            future: Any = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future.then(lambda done: [done.value() * 2])

        models = await wrapped(groups, Mlp)
        for model in models:
            model.register_comm_hook(object(), double)
        await at_all(models, backward)
        alone = Mlp()
        torch.autograd.backward(loss_of(alone(rows(0))).mul(2))
        assert same(grads_of(models[0]), grads_of(alone))


class TestErrors:
    @pytest.mark.parametrize(
        ("result", "says"),
        [
            (None, "returned a NoneType for a bucket of 403 elements"),
            (torch.ones(3), r"returned a tensor of shape \(3,\)"),
        ],
    )
    async def test_invalid_result_of_a_hook_is_refused(
        self, groups: list[Group], result: Any, says: str
    ) -> None:
        async def hook(_: object, bucket: GradBucket) -> Any:
            return result

        models = await wrapped(groups, Mlp)
        for model in models:
            model.register_comm_hook(None, hook)
        results = await outcomes(*(backward(r, m) for r, m in enumerate(models)))
        own = [error for error in results if isinstance(error, UsageError)]
        assert own
        with pytest.raises(UsageError, match=says):
            raise own[0]

    async def test_hook_that_raises_fails_on_every_rank(
        self, groups: list[Group]
    ) -> None:
        async def hook(state: Group, bucket: GradBucket) -> torch.Tensor:
            if state.rank == 1 and fails:
                raise ArithmeticError("no sum today")
            return await mean(state, bucket)

        fails = [True]
        models = await wrapped(groups, Mlp)
        for model in models:
            model.register_comm_hook(None, hook)
        errors = await outcomes(*(backward(r, m) for r, m in enumerate(models)))
        assert isinstance(errors[1], ArithmeticError)
        assert isinstance(errors[0], CollectiveError)
        assert "rank 1 ('b') failed in its communication hook" in str(errors[0])
        assert "no sum today" in str(errors[0])
        fails.clear()
        await at_all(models, backward)
        assert same(grads_of(models[0]), mean_grads(Mlp, 2))

    async def test_second_hook_is_refused(self, groups: list[Group]) -> None:
        (model, _) = await wrapped(groups, Mlp)
        model.register_comm_hook(None, mean)
        with pytest.raises(UsageError, match="already"):
            model.register_comm_hook(None, mean)

    async def test_hook_for_sparse_gradients_is_refused(
        self, groups: list[Group]
    ) -> None:
        (model, _) = await wrapped(groups, lambda: nn.Embedding(3, 2, sparse=True))
        with pytest.raises(UsageError, match="sparse=False"):
            model.register_comm_hook(None, mean)


@pytest.mark.parametrize(
    "hook",
    [
        default_hooks.allreduce_hook,
        default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
    ],
)
async def test_a_hook_of_torchs_without_a_state_uses_torchs_default_group(
    hook: Any,
) -> None:
    store: Any = dist.HashStore()  # type: ignore[attr-defined]  # it is not in __all__
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        async with groups_of(1) as (group,):
            (model,) = await wrapped([group], Mlp)
            model.register_comm_hook(None, hook)
            await backward(0, model)
            assert len(grads_of(model)) > 0
    finally:
        dist.destroy_process_group()
