"""A step over many owners equals the step of one optimizer in one process, bitwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from asyncrpc import RRef, UsageError
from asyncrpc.autograd import backward, context, get_gradients
from asyncrpc.errors import OptimizerError
from asyncrpc.optim import DistributedOptimizer
from asyncrpc.testing import Cluster, acting_as
from tests.numerics.groups import (
    STEPS,
    assert_same,
    group_of,
    inputs,
    layers,
    local_step,
    loss_of,
    one_process,
    remote_step,
)
from tests.numerics.optimizers import layer_of
from tests.numerics.remote import Layer, PlainSGD, grads, set_grads

# --- equal to one process ------------------------------------------------------------


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1}),
        (
            torch.optim.SGD,
            {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
        ),
        (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
        (torch.optim.Adam, {"lr": 0.01, "foreach": True}),
        (torch.optim.AdamW, {"lr": 0.01}),
        (torch.optim.Adadelta, {}),
        (torch.optim.Adafactor, {}),
        (torch.optim.Adagrad, {"lr": 0.1}),
        (torch.optim.Adamax, {}),
        (torch.optim.ASGD, {}),
        (torch.optim.NAdam, {}),
        (torch.optim.RAdam, {}),
        (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5}),
        (torch.optim.Rprop, {}),
        (PlainSGD, {"lr": 0.1}),
    ],
)
@pytest.mark.parametrize("on", ["b", "bc", "bca"])
async def test_optimizer_steps_as_in_one_process(
    cls: Any, options: dict[str, Any], on: str
) -> None:
    model, local = one_process(len(on), lambda it: cls(it.parameters(), **options))
    async with layers(on) as group:
        optimizer = DistributedOptimizer(cls, group.parameters, **options)
        for step in range(STEPS):
            local_step(model, local, step)
            result = await remote_step(group, optimizer, step)
            assert result.is_applied
            assert result.gradients == len(group.parameters)
            assert result.grad_norm is None
        assert_same(await group.weights(), model)


@pytest.mark.parametrize("wanted", ["Sgd", "lr_scheduler", "Optimizer", "", 3, Layer])
async def test_invalid_optimizer_class_is_refused(wanted: Any) -> None:
    async with layers("b") as group:
        with pytest.raises(
            UsageError, match=r"optimizer_class must be|has ASGD, .* SparseAdam"
        ):
            DistributedOptimizer(wanted, group.parameters)
        with pytest.raises(OptimizerError, match=r"'b'.* made a Layer"):
            await DistributedOptimizer(layer_of, group.parameters)  # type: ignore[arg-type]


@pytest.mark.parametrize("on", ["b", "bca"])
@pytest.mark.parametrize("clip", [0.5, 1e6])
async def test_gradients_are_clipped_by_their_norm_over_all_owners(
    on: str, clip: float
) -> None:
    model, local = one_process(
        len(on), lambda it: torch.optim.SGD(it.parameters(), lr=0.1)
    )
    async with layers(on) as group:
        optimizer = DistributedOptimizer(torch.optim.SGD, group.parameters, 0.1)
        for step in range(STEPS):
            local.zero_grad()
            loss_of(model(inputs(step))).backward()  # type: ignore[no-untyped-call]
            norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
            local.step()
            result = await remote_step(group, optimizer, step, clip_grad_norm=clip)
            assert result.grad_norm == pytest.approx(norm.item(), rel=1e-12)
        torch.testing.assert_close(
            await group.weights(), list(model.parameters()), rtol=1e-12, atol=1e-12
        )


# --- only what is this context's, only what is ours ----------------------------------


@pytest.mark.parametrize("cls", [PlainSGD, torch.optim.SGD])
async def test_a_gradient_is_never_applied_twice(cls: Any) -> None:
    """A parameter that took part in step 1 and not in step 2 stays as step 1 left it.

    torch.distributed.optim steps it again, for optimizers without a functional twin.
    """
    async with Cluster(1) as (worker,):
        with acting_as(worker):
            used = torch.zeros(1, requires_grad=True)
            unused = torch.zeros(1, requires_grad=True)
            optimizer = DistributedOptimizer(cls, [RRef(used), RRef(unused)], lr=0.1)
            async with context() as ctx:
                await backward(ctx, [(used + unused).sum()])
                assert (await optimizer.step(ctx)).gradients == 2
            async with context() as ctx:
                await backward(ctx, [used.sum()])
                assert (await optimizer.step(ctx)).gradients == 1
            assert used.item() == pytest.approx(-0.2)
            assert unused.item() == pytest.approx(-0.1)


async def test_owner_without_gradients_is_unchanged() -> None:
    async with group_of("bc") as group:
        optimizer = DistributedOptimizer(torch.optim.SGD, group.parameters, lr=1.0)
        async with context() as ctx:
            out = await group.modules[0].rpc_async()(torch.ones(3, dtype=torch.float64))
            await backward(ctx, [out.sum()])
            assert (await optimizer.step(ctx)).gradients == 1
        stepped, left = await group.weights()
        assert stepped.tolist() == [0.0] * 3
        assert left.tolist() == [1.0] * 3


async def test_parameters_of_other_optimizers_are_unchanged() -> None:
    async with layers("bc") as group:
        before = await group.weights()
        mine = group.parameters[:1]
        optimizer = DistributedOptimizer(torch.optim.SGD, mine, lr=0.1)
        assert (await remote_step(group, optimizer, 0)).gradients == 1
        after = await group.weights()
        assert not torch.equal(before[0], after[0])
        for old, new in zip(before[1:], after[1:], strict=True):
            assert torch.equal(old, new)
        del mine


async def test_grad_of_the_program_is_not_applied() -> None:
    async with Cluster(1) as (worker,):
        with acting_as(worker):
            used = torch.zeros(1, requires_grad=True)
            unused = torch.zeros(1, requires_grad=True)
            for parameter in (used, unused):
                parameter.grad = torch.full((1,), 5.0)
            optimizer = DistributedOptimizer("SGD", [RRef(used), RRef(unused)], lr=1.0)
            async with context() as ctx:
                await backward(ctx, [used.sum()])
                await optimizer.step(ctx)
            assert (used.item(), unused.item()) == (-1.0, 0.0)
            assert [parameter.grad for parameter in (used, unused)] == [5.0, 5.0]


async def test_grad_attribute_stays_unchanged() -> None:
    async with layers("bc") as group:
        first, second = group.modules
        await group.workers[0].peer("b").call(set_grads, first, 3.0)
        optimizer = DistributedOptimizer(torch.optim.SGD, group.parameters, lr=0.1)
        await remote_step(group, optimizer, 0)
        kept = await group.workers[0].peer("b").call(grads, first)
        assert all(grad is not None and bool((grad == 3.0).all()) for grad in kept)
        assert await group.workers[0].peer("c").call(grads, second) == [None, None]
        del first, second


async def test_clipping_keeps_the_gradients_of_the_context() -> None:
    async with Cluster(1) as (worker,):
        with acting_as(worker):
            x = torch.zeros(4, requires_grad=True)
            optimizer = DistributedOptimizer(torch.optim.SGD, [RRef(x)], lr=1.0)
            async with context() as ctx:
                await backward(ctx, [3 * x.sum()])
                await optimizer.step(ctx, clip_grad_norm=1.0)
                assert get_gradients(ctx)[x].tolist() == [3.0] * 4
            assert x.norm().item() == pytest.approx(1.0, rel=1e-5)
