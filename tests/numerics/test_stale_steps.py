"""Trainers that do not wait for one another: steps between a forward and a backward."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from asyncrpc import RRef, autograd, current_worker
from asyncrpc.errors import BackwardFailedError
from asyncrpc.optim import DistributedOptimizer
from asyncrpc.testing import Cluster, acting_as

# y = w * w * x: its gradient 2 w x needs the value of w at the time of the backward.
WEIGHT = 3.0


class Square:
    def __init__(self) -> None:
        self.weight = torch.tensor(WEIGHT, dtype=torch.double, requires_grad=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * self.weight * x

    def parameters(self) -> list[RRef[torch.Tensor]]:
        return [RRef(self.weight)]

    def value(self) -> float:
        return self.weight.item()


async def crossed_passes(*, allow_stale: bool) -> float:
    """Go forward twice, then backward and step twice; return the weight."""
    async with Cluster(names=["trainer", "owner"]) as (trainer, _):
        with acting_as(trainer):
            module = current_worker().peer("owner").remote(Square)
            parameters = await module.rpc_async().parameters()
            optimizer = await DistributedOptimizer(torch.optim.SGD, parameters, lr=0.1)
            x = torch.ones((), dtype=torch.double)
            both_forward = asyncio.Barrier(2)
            first_stepped = asyncio.Event()

            async def train(*, is_first: bool) -> None:
                async with autograd.context() as ctx:
                    y = await module.rpc_async().forward(x)
                    await both_forward.wait()
                    if not is_first:
                        await first_stepped.wait()
                    await autograd.backward(ctx, [y])
                    await optimizer.step(ctx, allow_stale=allow_stale)
                    first_stepped.set()

            await asyncio.gather(train(is_first=True), train(is_first=False))
            value: float = await module.rpc_async().value()
            return value


async def test_stale_backward_uses_the_new_values_when_allowed() -> None:
    once = WEIGHT - 0.1 * 2 * WEIGHT
    assert await crossed_passes(allow_stale=True) == pytest.approx(once - 0.2 * once)


async def test_stale_backward_is_refused_by_default() -> None:
    said = r"modified by an inplace operation.*allow_stale=True"
    with pytest.raises(BackwardFailedError, match=f"(?s){said}"):
        await crossed_passes(allow_stale=False)


WEIGHTS: list[torch.Tensor] = []  # of the owner, which is in this process
PRODUCTS: list[torch.Tensor] = []


class Interrupted(torch.optim.SGD):
    """Runs a trainer's forward pass when it has changed the parameters, in its step."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        with torch.enable_grad():
            PRODUCTS.append(WEIGHTS[0] * WEIGHTS[0])


async def test_a_forward_pass_during_a_stale_step_can_go_backward() -> None:
    weight = torch.tensor(WEIGHT, requires_grad=True)
    WEIGHTS[:], PRODUCTS[:] = [weight], []
    async with Cluster(names=["owner"]) as (owner,):
        with acting_as(owner):
            optimizer = await DistributedOptimizer(Interrupted, [RRef(weight)], lr=0.1)
            async with autograd.context() as ctx:
                await autograd.backward(ctx, [weight * weight])
                await optimizer.step(ctx, allow_stale=True)
    PRODUCTS[0].backward()  # type: ignore[no-untyped-call]
    once = WEIGHT - 0.1 * 2 * WEIGHT
    assert weight.grad is not None
    assert weight.grad.item() == pytest.approx(2 * once)
