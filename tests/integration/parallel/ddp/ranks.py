"""Ranks that train the same module, in one process, and what they should come to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from asyncrpc import Group, Options
from asyncrpc.ddp import DistributedDataParallel
from asyncrpc.testing import Cluster

T = TypeVar("T")
Model = DistributedDataParallel
Grads = list[torch.Tensor | None]


@asynccontextmanager
async def groups_of(size: int) -> AsyncIterator[list[Group]]:
    """Make a group, and give it as each of its ranks has it."""
    async with Cluster(size, options=Options(drain_timeout_s=0.5)) as workers:
        yield [Group(worker, timeout_s=60.0) for worker in workers]


async def wrapped(
    groups: Sequence[Group], make: Callable[[], nn.Module], **options: Any
) -> list[Model]:
    """Wrap a module at every rank."""
    return list(
        await asyncio.gather(*(Model(make(), group, **options) for group in groups))
    )


async def at_all(
    models: Sequence[Model], function: Callable[[int, Model], Awaitable[T]]
) -> list[T]:
    """Run a coroutine function at every rank."""
    return list(
        await asyncio.gather(
            *(function(rank, model) for rank, model in enumerate(models))
        )
    )


async def outcomes(*awaitables: Awaitable[Any]) -> list[Any]:
    """Return what comes of each, errors too."""
    return list(await asyncio.gather(*awaitables, return_exceptions=True))


class Mlp(nn.Module):
    """Two layers; parameters of several sizes."""

    def __init__(self, width: int = 40) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(6, width)
        self.second = nn.Linear(width, 3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map `(batch, 6)` to `(batch, 3)`."""
        result: torch.Tensor = self.second(self.first(rows).tanh())
        return result


class Branches(nn.Module):
    """Of its two branches one is used at a time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.common = nn.Linear(6, 6)
        self.branches = nn.ModuleList([nn.Linear(6, 2), nn.Linear(6, 2)])
        self.never = nn.Parameter(torch.ones(3))

    def forward(self, rows: torch.Tensor, branch: int) -> torch.Tensor:
        """Map `(batch, 6)` to `(batch, 2)`."""
        result: torch.Tensor = self.branches[branch](self.common(rows).tanh())
        return result


def rows(rank: int, step: int = 0) -> torch.Tensor:
    """Return the inputs of a rank: `(5, 6)`."""
    draw = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(5, 6, generator=draw)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    """Return a scalar."""
    return output.square().mean()


def grads_of(module: nn.Module) -> Grads:
    """Return copies of the gradients."""
    return [
        None if parameter.grad is None else parameter.grad.clone()
        for parameter in module.parameters()
    ]


def mean_grads(
    make: Callable[[], nn.Module], size: int, step: int = 0, **inputs: Any
) -> Grads:
    """Compute in one process what the gradients of all ranks should be."""
    module = make()
    for rank in range(size):
        torch.autograd.backward(loss_of(module(rows(rank, step), **inputs)).div(size))
    return grads_of(module)


def same(actual: Grads, wanted: Grads) -> bool:
    """Say whether gradients are the same, but for the order of sums."""
    return len(actual) == len(wanted) and all(
        grad is other
        if grad is None or other is None
        else torch.allclose(grad, other, rtol=1e-5, atol=1e-7)
        for grad, other in zip(actual, wanted, strict=True)
    )


def identical(all_: Sequence[Grads]) -> bool:
    """Say whether all ranks have the same bits."""
    return all(
        (grad is None and other is None)
        or (grad is not None and other is not None and torch.equal(grad, other))
        for grads in all_[1:]
        for grad, other in zip(grads, all_[0], strict=True)
    )
