"""torch's own schedulers, run by the trainer, change the steps of every owner."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lrs

from asyncrpc import UsageError
from asyncrpc.autograd import backward, context
from asyncrpc.errors import OptimizerError
from asyncrpc.optim import DistributedOptimizer
from tests.numerics.groups import (
    assert_same,
    inputs,
    layers,
    local_step,
    one_process,
    remote_step,
)

STEPS = 6
Make = Callable[[torch.optim.Optimizer], Any]


def sequential(optimizer: torch.optim.Optimizer) -> Any:
    warm = lrs.LinearLR(optimizer, start_factor=0.1, total_iters=2)
    after = lrs.CosineAnnealingLR(optimizer, T_max=4)
    return lrs.SequentialLR(optimizer, [warm, after], milestones=[2])


def chained(optimizer: torch.optim.Optimizer) -> Any:
    both = [lrs.ConstantLR(optimizer), lrs.ExponentialLR(optimizer, gamma=0.9)]
    return lrs.ChainedScheduler(both, optimizer)


SCHEDULES: dict[str, Make] = {
    "StepLR": lambda it: lrs.StepLR(it, step_size=2, gamma=0.5),
    "MultiStepLR": lambda it: lrs.MultiStepLR(it, milestones=[1, 4]),
    "LambdaLR": lambda it: lrs.LambdaLR(it, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda it: lrs.MultiplicativeLR(it, lambda _: 0.95),
    "CosineAnnealingWarmRestarts": lambda it: lrs.CosineAnnealingWarmRestarts(it, 3),
    "PolynomialLR": lambda it: lrs.PolynomialLR(it, total_iters=4, power=2.0),
    "CyclicLR": lambda it: lrs.CyclicLR(it, 0.01, 0.2, step_size_up=2),
    "OneCycleLR": lambda it: lrs.OneCycleLR(it, max_lr=0.5, total_steps=STEPS + 1),
    "SequentialLR": sequential,
    "ChainedScheduler": chained,
    "SWALR": lambda it: torch.optim.swa_utils.SWALR(it, swa_lr=0.05, anneal_epochs=3),
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9},  # CyclicLR and OneCycleLR turn momentum, too,
    "AdamW": {"lr": 0.1},  # and the first of Adam's betas
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("schedule", SCHEDULES)
async def test_schedule_equals_one_process(schedule: str, name: str) -> None:
    options, make = OPTIMIZERS[name], SCHEDULES[schedule]
    cls = getattr(torch.optim, name)
    model, local = one_process(2, lambda it: cls(it.parameters(), **options))
    wanted = make(local)
    async with layers("bc") as group:
        optimizer = await DistributedOptimizer(name, group.parameters, **options)
        remote_schedule = make(optimizer.options)
        for step in range(STEPS):
            local_step(model, local, step)
            wanted.step()
            await remote_step(group, optimizer, step)
            remote_schedule.step()
        assert remote_schedule.get_last_lr() == wanted.get_last_lr()
        assert_same(await group.weights(), model)
        state = await optimizer.state_dict()
        assert state["param_groups"] == local.state_dict()["param_groups"]


async def test_a_plateau_of_the_loss_lowers_the_rate() -> None:
    model, local = one_process(2, lambda it: torch.optim.SGD(it.parameters(), lr=0.1))
    wanted = lrs.ReduceLROnPlateau(local, patience=1, factor=0.5)
    async with layers("bc") as group:
        optimizer = await DistributedOptimizer("SGD", group.parameters, lr=0.1)
        found = lrs.ReduceLROnPlateau(optimizer.options, patience=1, factor=0.5)
        for step, loss in enumerate([1.0, 0.5, 0.5, 0.5, 0.5, 0.5, 0.4]):
            local_step(model, local, step)
            wanted.step(loss)
            await remote_step(group, optimizer, step)
            found.step(loss)
        assert found.get_last_lr() == wanted.get_last_lr() == [0.025]
        assert_same(await group.weights(), model)


async def test_groups_have_schedules_of_their_own() -> None:
    def groups_of(first: Any, second: Any) -> list[dict[str, Any]]:
        return [{"params": first, "lr": 0.5}, {"params": second}]

    def prepare(it: nn.Sequential) -> torch.optim.Optimizer:
        groups = groups_of(list(it[0].parameters()), list(it[1].parameters()))
        return torch.optim.SGD(groups, lr=0.1)

    factors = [lambda epoch: 0.5**epoch, lambda epoch: 1.0 / (epoch + 1)]
    model, local = one_process(2, prepare)
    wanted = lrs.LambdaLR(local, factors)
    async with layers("bc") as group:
        groups = groups_of(group.parameters[:2], group.parameters[2:])
        optimizer = await DistributedOptimizer("SGD", groups, lr=0.1)
        found = lrs.LambdaLR(optimizer.options, factors)
        for step in range(STEPS):
            local_step(model, local, step)
            wanted.step()
            await remote_step(group, optimizer, step)
            found.step()
        assert_same(await group.weights(), model)
        del groups


async def test_a_rate_is_set_by_hand_and_may_be_a_tensor() -> None:
    async with layers("bc") as group:
        optimizer = await DistributedOptimizer(
            "Adam", group.parameters, lr=torch.tensor(0.1)
        )
        model, local = one_process(
            2, lambda it: torch.optim.Adam(it.parameters(), lr=torch.tensor(0.1))
        )
        for step in range(3):
            for one in (local, optimizer.options):
                one.param_groups[0]["lr"].fill_(0.1 / (step + 1))
                one.param_groups[0]["weight_decay"] = 0.1 * step
                one.param_groups[0]["maximize"] = step == 1
            local_step(model, local, step)
            await remote_step(group, optimizer, step)
        assert_same(await group.weights(), model)


async def test_a_step_that_is_skipped_leaves_the_rate_to_the_next() -> None:
    model, local = one_process(2, lambda it: torch.optim.SGD(it.parameters(), lr=0.5))
    async with layers("bc") as group:
        optimizer = await DistributedOptimizer("SGD", group.parameters, lr=0.1)
        optimizer.options.param_groups[0]["lr"] = 0.5
        async with context() as ctx:
            loss = (await group.forward(inputs(0))).sum() * math.nan
            await backward(ctx, [loss])
            skipped = await optimizer.step(ctx, skip_nonfinite=True)
            assert not skipped.is_applied
        local_step(model, local, 0)
        await remote_step(group, optimizer, 0)
        assert_same(await group.weights(), model)


async def test_options_that_an_owner_refuses_are_applied_nowhere() -> None:
    async with layers("bc") as group:
        optimizer = await DistributedOptimizer("Adam", group.parameters, lr=0.1)
        await remote_step(group, optimizer, 0)
        before = await group.weights()
        # It needs a state that Adam has only if it was so from the beginning.
        optimizer.options.param_groups[0]["amsgrad"] = True
        with pytest.raises(OptimizerError, match="nothing was applied anywhere"):
            await remote_step(group, optimizer, 1)
        for one, other in zip(await group.weights(), before, strict=True):
            assert torch.equal(one, other)
        optimizer.options.param_groups[0]["amsgrad"] = False
        assert (await remote_step(group, optimizer, 1)).is_applied


async def test_options_are_known_when_the_optimizer_is_made() -> None:
    async with layers("b") as group:
        optimizer = DistributedOptimizer("SGD", group.parameters, lr=0.1)
        with pytest.raises(UsageError, match="await the optimizer first"):
            _ = optimizer.options
        await optimizer
        assert optimizer.options.param_groups[0]["momentum"] == 0
        assert optimizer.options.defaults["lr"] == 0.1
        with pytest.raises(UsageError, match=r"await optimizer\.step"):
            optimizer.options.step()
