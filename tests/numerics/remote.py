"""What the tests of this folder run on other workers: importable in any process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

import asyncrpc
from asyncrpc import RRef
from asyncrpc.autograd import backward, context, current_context, get_gradients
from asyncrpc.optim import DistributedOptimizer

Tensors = list[torch.Tensor]


class Layer(nn.Module):
    """One seeded layer in double precision, so that two of a seed are equal."""

    def __init__(self, inputs: int, outputs: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> nn.Parameter:
            return nn.Parameter(
                torch.randn(*shape, generator=generator, dtype=torch.float64)
            )

        self.weight, self.bias = draw(outputs, inputs), draw(outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(nn.functional.linear(x, self.weight, self.bias))

    def weights(self) -> Tensors:
        return [parameter.detach().clone() for parameter in self.parameters()]


class Scale(nn.Module):
    """`w * x`: its backward pass does not need `w`, so steps may come in between."""

    def __init__(self, elements: int = 3) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(elements, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w * x

    def weights(self) -> Tensors:
        return [self.w.detach().clone()]


class PlainSGD(torch.optim.Optimizer):
    """An optimizer that torch has no functional twin of; it fails if told to."""

    def __init__(
        self, params: Iterable[Any], lr: float = 0.1, fails_at: int = 0
    ) -> None:
        super().__init__(params, {"lr": lr})
        self.fails_at = fails_at  # elements of a parameter

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.numel() == self.fails_at:
                    raise ArithmeticError("this optimizer fails here")
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * parameter.grad)


async def parameters(module: RRef[nn.Module]) -> list[RRef[nn.Parameter]]:
    return [RRef(parameter) for parameter in (await module.to_here()).parameters()]


async def set_grads(module: RRef[nn.Module], value: float) -> None:
    for parameter in (await module.to_here()).parameters():
        parameter.grad = torch.full_like(parameter, value)


async def grads(module: RRef[nn.Module]) -> list[torch.Tensor | None]:
    return [parameter.grad for parameter in (await module.to_here()).parameters()]


async def gathered(module: RRef[nn.Module]) -> list[torch.Tensor | None]:
    """Return the gradients of the caller's context, in the parameters' order."""
    gradients = get_gradients(current_context())
    return [
        gradients.get(parameter) for parameter in (await module.to_here()).parameters()
    ]


async def total(module: RRef[nn.Module], x: torch.Tensor) -> torch.Tensor:
    """Return the sum of what a module makes, wherever that is."""
    result: torch.Tensor = await module.rpc_async()(x)
    return result.sum()


async def parameters_there(module: RRef[nn.Module]) -> list[RRef[nn.Parameter]]:
    references: list[RRef[nn.Parameter]] = await asyncrpc.rpc_async(
        module.owner_name(), parameters, (module,)
    )
    return references


class Trainer:
    """Trains stages that it shares with others, by an optimizer of its own."""

    def __init__(self, stages: list[RRef[nn.Module]]) -> None:
        self.stages = stages
        self.optimizer: DistributedOptimizer | None = None

    async def step(self, x: torch.Tensor, y: torch.Tensor) -> tuple[float, Tensors]:
        """Return the loss and the gradients of one batch, after a step by them."""
        if self.optimizer is None:
            by_stage = [await parameters_there(stage) for stage in self.stages]
            flat = [reference for stage in by_stage for reference in stage]
            self.optimizer = await DistributedOptimizer(
                torch.optim.SGD, flat, lr=0.1, momentum=0.9
            )
        async with context() as ctx:
            out = x
            for stage in self.stages:
                out = await stage.rpc_async()(out)
            loss = (out - y).square().mean()
            await backward(ctx, [loss])
            gradients = [await self._gathered(stage) for stage in self.stages]
            await self.optimizer.step(ctx)
        return loss.item(), [gradient for stage in gradients for gradient in stage]

    async def _gathered(self, stage: RRef[nn.Module]) -> Tensors:
        gradients: Tensors = await asyncrpc.rpc_async(
            stage.owner_name(), gathered, (stage,)
        )
        return gradients
