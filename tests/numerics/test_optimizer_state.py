"""State and schedules of an optimizer over many owners are those of one process.

Saved, and loaded in other processes, on other workers or in one process, training goes
on bit for bit; torch's own schedulers, run by the trainer, change every owner's steps.
"""

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
    STEPS,
    assert_same,
    group_of,
    inputs,
    layers,
    local_step,
    one_process,
    remote_step,
    step_on_ones,
)
from tests.numerics.optimizers import Counting, same

# Momenta, numbers of steps, and averages: whatever torch's keep.
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1, "momentum": 0.9}),
    ("Adam", {"lr": 0.1, "amsgrad": True}),
    ("RMSprop", {"lr": 0.01, "centered": True}),
    ("Adafactor", {}),
]


@pytest.mark.parametrize(("name", "options"), KINDS)
@pytest.mark.parametrize("on", ["b", "bc", "bca"])
async def test_state_equals_one_process(
    name: str, options: dict[str, Any], on: str
) -> None:
    cls = getattr(torch.optim, name)
    model, local = one_process(len(on), lambda it: cls(it.parameters(), **options))
    async with layers(on) as group:
        optimizer = DistributedOptimizer(name, group.parameters, **options)
        for step in range(2):
            local_step(model, local, step)
            await remote_step(group, optimizer, step)
        state = await optimizer.state_dict()
        assert same(state, local.state_dict())
        # Into torch's own, which goes on as the distributed one.
        fresh = cls(model.parameters(), lr=7.0)
        fresh.load_state_dict(state)
        for step in range(2, STEPS):
            local_step(model, fresh, step)
            await remote_step(group, optimizer, step)
        assert_same(await group.weights(), model)


@pytest.mark.parametrize(("name", "options"), KINDS)
@pytest.mark.parametrize("per_owner", [False, True], ids=["whole", "per-owner"])
async def test_loaded_state_continues_bitwise(
    name: str, options: dict[str, Any], *, per_owner: bool
) -> None:
    cls = getattr(torch.optim, name)
    model, local = one_process(2, lambda it: cls(it.parameters(), **options))
    async with layers("bc") as group:
        first = DistributedOptimizer(name, group.parameters, **options)
        for step in range(2):
            local_step(model, local, step)
            await remote_step(group, first, step)
        for holder in (local, first.options):
            holder.param_groups[0]["lr"] = 0.03  # told to no owner yet
        state = await first.state_dict(per_owner=per_owner)
        second = DistributedOptimizer(name, group.parameters, lr=7.0)
        await second.load_state_dict(state)
        assert second.options.param_groups[0]["lr"] == 0.03
        for step in range(2, STEPS):
            local_step(model, local, step)
            await remote_step(group, second, step)
        assert_same(await group.weights(), model)


async def test_state_may_be_loaded_by_other_owners() -> None:
    model, local = one_process(3, lambda it: torch.optim.Adam(it.parameters(), lr=0.1))
    async with layers("bca") as group:
        first = DistributedOptimizer("Adam", group.parameters, lr=0.1)
        for step in range(2):
            local_step(model, local, step)
            await remote_step(group, first, step)
        state, weights = await first.state_dict(), await group.weights()
    async with layers("aab") as group:
        for number, module in enumerate(group.modules):
            part = weights[2 * number : 2 * number + 2]
            await module.rpc_async().load_state_dict(
                dict(zip(("weight", "bias"), part, strict=True))
            )
        second = DistributedOptimizer("Adam", group.parameters, lr=0.1)
        await second.load_state_dict(state)
        for step in range(2, STEPS):
            local_step(model, local, step)
            await remote_step(group, second, step)
        assert_same(await group.weights(), model)


async def test_groups_that_were_added_are_part_of_the_state() -> None:
    def prepare(it: nn.Sequential) -> torch.optim.Optimizer:
        return torch.optim.Adam([next(it[1].parameters())], lr=0.1)

    model, local = one_process(2, prepare)
    async with layers("bc") as group:
        first, bias, second, last = group.parameters
        optimizer = DistributedOptimizer("Adam", [second], lr=0.1)
        assert repr(optimizer) == "<DistributedOptimizer Adam on 'c'>"
        for step in range(STEPS):
            local_step(model, local, step)
            await remote_step(group, optimizer, step)
            if step == 1:
                # Of an owner that has some, and of another one.
                own = [*model[0].parameters(), model[1].bias]
                local.add_param_group({"params": own, "lr": 0.01})
                listed = [first, bias, last]
                await optimizer.add_param_group({"params": listed, "lr": 0.01})
        rates = [param_group["lr"] for param_group in optimizer.options.param_groups]
        assert rates == [0.1, 0.01]
        assert same(await optimizer.state_dict(), local.state_dict())
        assert_same(await group.weights(), model)
        del first, bias, second, last, listed


async def test_state_of_another_model_is_refused() -> None:
    async with layers("bc") as group:
        optimizer = DistributedOptimizer("Adam", group.parameters, lr=0.1)
        parts = await optimizer.state_dict(per_owner=True)
        assert set(parts["owners"]) == {"b", "c"}
        del parts["owners"]["c"]
        with pytest.raises(UsageError, match=r"workers \['b'\].* are on \['b', 'c'\]"):
            await optimizer.load_state_dict(parts)
        other = torch.optim.Adam([torch.ones(1, requires_grad=True)])
        with pytest.raises(UsageError, match=r"groups of \[1\].* groups of \[4\]"):
            await optimizer.load_state_dict(other.state_dict())
        with pytest.raises(UsageError, match="'param_groups'"):
            await optimizer.load_state_dict({"model": {}})


async def test_a_state_with_tensors_of_other_shapes_fails_and_changes_nothing() -> None:
    """torch checks no shape of a state: the step with it raises."""
    async with group_of("bc") as group:
        optimizer = DistributedOptimizer("Adam", group.parameters, lr=0.1)
        await step_on_ones(group, optimizer)
        state, before = await optimizer.state_dict(), await group.weights()
        state["state"][1]["exp_avg"] = torch.zeros(7, dtype=torch.float64)
        await optimizer.load_state_dict(state)
        with pytest.raises(OptimizerError, match=r"'c', and nothing was applied any"):
            await step_on_ones(group, optimizer)
        assert same(await group.weights(), before)


async def test_state_without_a_parameter_is_kept_per_owner() -> None:
    async with group_of("bc") as group:
        optimizer = DistributedOptimizer(Counting, group.parameters)
        await step_on_ones(group, optimizer)
        with pytest.raises(UsageError, match=r"'steps'.*per_owner=True"):
            await optimizer.state_dict()
        state = await optimizer.state_dict(per_owner=True)
        assert state["owners"]["c"]["state"] == {"steps": 1}


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
    "OneCycleLR": lambda it: lrs.OneCycleLR(it, max_lr=0.5, total_steps=7),
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
        reduce_lron_plateau = lrs.ReduceLROnPlateau(
            optimizer.options, patience=1, factor=0.5
        )
        for step, loss in enumerate([1.0, 0.5, 0.5, 0.5, 0.5, 0.5, 0.4]):
            local_step(model, local, step)
            wanted.step(loss)
            await remote_step(group, optimizer, step)
            reduce_lron_plateau.step(loss)
        assert reduce_lron_plateau.get_last_lr() == wanted.get_last_lr() == [0.025]
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
        assert [
            param_group["lr"] for param_group in optimizer.options.param_groups
        ] == [0.5, 0.1]
        lambda_lr = lrs.LambdaLR(optimizer.options, factors)
        for step in range(STEPS):
            local_step(model, local, step)
            wanted.step()
            await remote_step(group, optimizer, step)
            lambda_lr.step()
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
            for target in (local, optimizer.options):
                target.param_groups[0]["lr"].fill_(0.1 / (step + 1))
                target.param_groups[0]["weight_decay"] = 0.1 * step
                target.param_groups[0]["maximize"] = step == 1
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
        for weight, other in zip(await group.weights(), before, strict=True):
            assert torch.equal(weight, other)
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
