"""The state of an optimizer over many owners is that of one in one process.

Saved, and loaded in other processes, on other workers or in one process, training goes
on bit for bit.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from asyncrpc import UsageError
from asyncrpc.errors import OptimizerError
from asyncrpc.optim import DistributedOptimizer
from tests.numerics.groups import (
    STEPS,
    assert_same,
    group_of,
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
        first, bias, second, _ = group.parameters
        optimizer = DistributedOptimizer("Adam", [second], lr=0.1)
        for step in range(STEPS):
            local_step(model, local, step)
            await remote_step(group, optimizer, step)
            if step == 1:
                own = list(model[0].parameters())
                local.add_param_group({"params": own, "lr": 0.01})
                await optimizer.add_param_group({"params": [first, bias], "lr": 0.01})
        assert same(await optimizer.state_dict(), local.state_dict())
        assert_same(await group.weights(), model)
        del first, bias, second, _


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
