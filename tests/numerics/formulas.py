"""What distributed programs compute on each worker, and the same in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import asyncrpc
from asyncrpc import autograd

SHAPE = (3,)
# By worker: all workers of a test share this process, not their parameters.
parameters: dict[str, list[torch.Tensor]] = {}


def make_parameters(names: list[str], count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    parameters.clear()
    for name in names:
        parameters[name] = [
            torch.randn(SHAPE, dtype=torch.double, generator=generator).requires_grad_()
            for _ in range(count)
        ]


def here() -> list[torch.Tensor]:
    return parameters[asyncrpc.current_worker().name]


def formula(
    one: torch.Tensor, other: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    return one * other.cos() + weight.sin() * one


async def _fetched(value: Any) -> Any:
    return await value.to_here() if isinstance(value, asyncrpc.RRef) else value


async def combine(one: Any, other: Any, index: int) -> torch.Tensor:
    """Apply the formula, with a parameter of the worker this runs on."""
    return formula(await _fetched(one), await _fetched(other), here()[index])


def combine_in_thread(
    one: torch.Tensor, other: torch.Tensor, index: int
) -> torch.Tensor:
    return formula(one, other, here()[index])


async def combine_by_way_of(to: str, one: Any, other: Any, index: int) -> torch.Tensor:
    """Hand the work on to another worker."""
    return await asyncrpc.current_worker().peer(to).call(combine, one, other, index)


def parameter(index: int) -> torch.Tensor:
    return here()[index]


async def zigzag(to: list[str], value: torch.Tensor) -> torch.Tensor:
    """Multiply here, go on to the next worker, multiply what comes back."""
    value = value * here()[0]
    if to:
        peer = asyncrpc.current_worker().peer(to[0])
        value = await peer.call(zigzag, to[1:], value)
    return value * here()[1]


def in_place(value: torch.Tensor) -> torch.Tensor:
    value.mul_(here()[0])
    value.add_(1)
    return value * value


class FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(_ctx: Any, *_: Any) -> Any:
        raise ArithmeticError("this node cannot go backward")


def failing(value: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = FailingBackward.apply(value * here()[0])  # type: ignore[no-untyped-call]
    return result


async def gradients_here(context_id: Sequence[int]) -> list[torch.Tensor | None]:
    """Return the gradient of each parameter of this worker, None where there is none.

    Waits for the pass to be committed here.
    """
    service: Any = asyncrpc.current_worker().parts.service("autograd")
    try:
        found = await service.gathered(service.context_of(context_id).id)
    except asyncrpc.errors.InvalidContextError:
        return []
    return [found.get(one) for one in here()]


def open_contexts() -> int:
    service: Any = asyncrpc.current_worker().parts.service("autograd")
    return int(service.open_contexts)


async def context_here() -> tuple[int, int]:
    creator, serial = autograd.current_context().id
    return creator, serial
