"""Optimizers of the user's, and what tests of steps run on other workers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

import asyncrpc
from asyncrpc import RRef
from asyncrpc.autograd import Context, backward, context
from asyncrpc.optim import DistributedOptimizer
from tests.numerics.remote import Layer, PlainSGD


def layer_of(_params: Iterable[Any]) -> Layer:
    """Make something that is no optimizer."""
    return Layer(1, 1, 0)


class Crowded(PlainSGD):
    """Fails if two of its kind step on the same parameters at once."""

    inside = threading.Lock()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not self.inside.acquire(blocking=False):
            raise RuntimeError("another step is under way")
        try:
            values = [
                param_group.detach().clone()
                for param_group in self.param_groups[0]["params"]
            ]
            super().step(closure)
            for now, before in zip(self.param_groups[0]["params"], values, strict=True):
                if now.grad is not None:
                    rate = self.param_groups[0]["lr"]
                    # Exactly this step's change: no other has come in between.
                    assert torch.equal(now, before - rate * now.grad)
        finally:
            self.inside.release()


class Failing(torch.optim.SGD):
    """Fails on one worker, at one of its steps, after it has changed all it has."""

    def __init__(
        self, params: Iterable[Any], lr: float = 0.1, on: str = "", at: int = 0
    ) -> None:
        super().__init__(params, lr=lr, momentum=0.9)
        self.countdown = at if asyncrpc.current_worker().name == on else -1

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        if self.countdown == 0:
            raise ArithmeticError("this optimizer fails here")
        self.countdown -= 1


class Gated(torch.optim.SGD):
    """Steps, on one worker, when the gate is open."""

    gate = threading.Event()

    def __init__(self, params: Iterable[Any], on: str) -> None:
        super().__init__(params, lr=1.0)
        self.is_gated = asyncrpc.current_worker().name == on

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.is_gated:
            assert self.gate.wait(10.0)
        super().step(closure)


async def train(
    modules: list[RRef[nn.Module]], parameters: list[RRef[Any]], kind: Any, steps: int
) -> int:
    """Step by ones, `steps` times; return how many were applied."""
    optimizer = DistributedOptimizer(kind, parameters, lr=1.0)
    applied = 0
    for _ in range(steps):
        async with context() as ctx:
            ones = torch.ones((), dtype=torch.float64)
            outs = [await module.rpc_async()(ones) for module in modules]
            await backward(ctx, [torch.cat(outs).sum()])
            result = await optimizer.step(ctx, allow_stale=True)
            applied += result.is_applied
    return applied


class Counting(PlainSGD):
    """Keeps a number that belongs to no parameter."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        state: dict[Any, Any] = self.state
        state["steps"] = state.get("steps", 0) + 1


class Lookahead(PlainSGD):
    """Takes the gradient at where a plain step would lead: it needs two evaluations."""

    @torch.no_grad()
    def step(self, closure: Any) -> torch.Tensor:  # type: ignore[override]
        with torch.enable_grad():
            loss: torch.Tensor = closure()
        listed = [
            parameter for group in self.param_groups for parameter in group["params"]
        ]
        before = [parameter.clone() for parameter in listed]
        super().step()
        with torch.enable_grad():
            closure()
        for parameter, value in zip(listed, before, strict=True):
            parameter.copy_(value)
        super().step()
        return loss


# Where this is the worker that is told: which evaluation another is at.
evaluations: asyncio.Queue[int] = asyncio.Queue()


async def tell(evaluation: int) -> None:
    await evaluations.put(evaluation)


async def step_and_wait(parameters: list[RRef[Any]], module: RRef[nn.Module]) -> None:
    """Step with LBFGS, and never come back from the second evaluation."""
    calls = 0

    async def closure(ctx: Context) -> torch.Tensor:
        nonlocal calls
        calls += 1
        await asyncrpc.rpc_async("a", tell, (calls,))
        if calls == 2:
            await asyncio.Event().wait()
        loss: torch.Tensor = (await module.rpc_async()(torch.ones(3).double())).sum()
        await backward(ctx, [loss])
        return loss

    await DistributedOptimizer("LBFGS", parameters).step(closure=closure)


def same(state: Any, other: Any) -> bool:
    """Say whether two states are equal, bit for bit."""
    if isinstance(state, dict) and isinstance(other, dict):
        return state.keys() == other.keys() and all(
            same(state[k], other[k]) for k in state
        )
    if isinstance(state, list | tuple) and isinstance(other, list | tuple):
        pairs = zip(state, other, strict=True)
        return len(state) == len(other) and all(same(*pair) for pair in pairs)
    if isinstance(state, torch.Tensor) and isinstance(other, torch.Tensor):
        return state.dtype == other.dtype and torch.equal(state, other)
    return bool(state == other)
