"""Optimizers that share out state, or average parameters, of modules on devices."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from asyncrpc import Group, UsageError, Worker
from asyncrpc.ddp import (
    DistributedDataParallel,
    PeriodicModelAverager,
    PostLocalSGDOptimizer,
    PostLocalSGDState,
    ZeroRedundancyOptimizer,
    post_localSGD_hook,
)
from tests.integration.devices.accelerators import TYPE, Hands
from tests.integration.devices.test_ddp import Net, at_both, batch

HOME = f"{TYPE}:0"
STEPS = 4
Pair = tuple[Worker, Worker]


class Wide(nn.Module):
    """Parameters of which some are sent alone, and some together."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        shapes = (6, 8), (8, 40_000), (40_000, 3)
        self.parts = nn.ParameterList(
            torch.randn(shape, generator=generator) / 30 for shape in shapes
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            inputs = torch.tanh(inputs @ part)
        return inputs


async def with_zero(
    worker: Worker, device: str, make: Any, kind: Any, options: dict[str, Any]
) -> tuple[list[torch.Tensor], Any]:
    """Train, consolidate, and go on with an optimizer that has loaded that."""
    hands = Hands(worker)
    async with Group(worker, ["a", "b"], name=f"zero on {device}") as group:
        module = await hands.do(lambda: make().to(device))
        model = await DistributedDataParallel(module, group)
        new_optimizer = partial(
            ZeroRedundancyOptimizer, [*module.parameters()], kind, group, **options
        )
        optimizer, state = new_optimizer(), None
        for step in range(STEPS):
            x = batch(group.rank, step)

            def loss(x: torch.Tensor = x) -> torch.Tensor:
                value: torch.Tensor = model(x.to(device)).square().mean()
                return value

            await hands.do(optimizer.zero_grad)
            await model.backward(await hands.do(loss))
            await optimizer.step()
            if step == 1:
                await optimizer.consolidate_state_dict(to=0)
                state = optimizer.state_dict() if group.rank == 0 else None
                (state,) = await _same(group, state)
                optimizer.close()
                optimizer = new_optimizer()
                await hands.do(partial(optimizer.load_state_dict, state))
        weights = await hands.do(
            lambda: [parameter.detach().cpu() for parameter in module.parameters()]
        )
        optimizer.close()
        model.close()
        return weights, state


_SAVED: list[Any] = []


async def _same(group: Group, state: Any) -> list[Any]:
    """Hand a state to the other rank, which is in this process."""
    if group.rank == 0:
        _SAVED[:] = [state]
    await group.barrier()
    return _SAVED


@pytest.mark.parametrize(
    ("make", "kind", "options"),
    [
        (lambda: Net(1), torch.optim.Adam, {"lr": 0.05}),
        (Wide, torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    ],
    ids=["small", "large"],
)
async def test_state_is_divided_as_on_the_host(
    pair: Pair, make: Any, kind: Any, options: dict[str, Any]
) -> None:
    async def on(device: str) -> list[Any]:
        return await at_both(
            pair, lambda worker: with_zero(worker, device, make, kind, options)
        )

    ours, other = await on(HOME)
    wanted, _ = await on("cpu")
    for mine, its, plain in zip(ours[0], other[0], wanted[0], strict=True):
        assert torch.equal(mine, its)
        assert torch.allclose(mine, plain, rtol=1e-4, atol=1e-5)
    kept = ours[1]["state"][0]
    assert {value.device.type for value in kept.values()} == {"cpu"}


async def test_views_of_a_bucket_are_refused(pair: Pair) -> None:
    async def run(worker: Worker) -> None:
        parameters = [nn.Parameter(await Hands(worker).put(torch.ones(3)))]
        async with Group(worker, ["a", "b"], name="views") as group:
            with pytest.raises(UsageError, match="parameters_as_bucket_view=False"):
                ZeroRedundancyOptimizer(
                    parameters,
                    torch.optim.SGD,
                    group,
                    lr=0.1,
                    parameters_as_bucket_view=True,
                )

    await asyncio.gather(*map(run, pair))


async def locally(worker: Worker, device: str) -> list[torch.Tensor]:
    """Train by gradients first, then each rank by itself, averaging now and then."""
    hands = Hands(worker)
    async with Group(worker, ["a", "b"], name=f"local on {device}") as group:
        module = await hands.do(lambda: Net(1).to(device))
        model = await DistributedDataParallel(module, group)
        state = PostLocalSGDState(None, None, start_localSGD_iter=1)
        model.register_comm_hook(state, post_localSGD_hook)
        averager = PeriodicModelAverager(group, period=2, warmup_steps=1)
        optimizer = PostLocalSGDOptimizer(
            torch.optim.SGD(module.parameters(), lr=0.1), averager
        )
        for step in range(STEPS):
            x = batch(group.rank, step)

            def loss(x: torch.Tensor = x) -> torch.Tensor:
                value: torch.Tensor = model(x.to(device)).square().mean()
                return value

            await hands.do(optimizer.zero_grad)
            await model.backward(await hands.do(loss))
            await optimizer.step()
        weights = await hands.do(
            lambda: [parameter.detach().cpu() for parameter in module.parameters()]
        )
        averager.close()
        model.close()
        return weights


async def test_parameters_are_averaged_as_on_the_host(pair: Pair) -> None:
    weights, other = await at_both(pair, lambda worker: locally(worker, HOME))
    wanted, its = await at_both(pair, lambda worker: locally(worker, "cpu"))
    for tensor, plain in zip([*weights, *other], [*wanted, *its], strict=True):
        assert torch.allclose(tensor, plain, rtol=1e-4, atol=1e-5)
