"""Ranks that share out an optimizer, in one process, and the optimizer of one rank."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from asyncrpc import Group
from asyncrpc.ddp import ZeroRedundancyOptimizer

Zero = ZeroRedundancyOptimizer
Parameters = list[torch.nn.Parameter]
# A matrix that is sent alone, small ones, an empty one, and one of another layout.
SHAPES = ((520, 520), (40, 7), (40,), (0, 3), (2, 3, 4, 5), (9,))


def make_parameters(
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    shapes: Sequence[tuple[int, ...]] = SHAPES,
) -> Parameters:
    """Make parameters, of the given dtypes in turn."""
    draw = torch.Generator().manual_seed(3)
    parameters = []
    for place, shape in enumerate(shapes):
        value = torch.randn(shape, generator=draw).to(dtypes[place % len(dtypes)])
        if len(shape) == 4:
            value = value.to(memory_format=torch.channels_last)
        parameters.append(torch.nn.Parameter(value))
    return parameters


def give_gradients(parameters: Parameters, step: int = 0) -> None:
    """Give each that requires one the gradient that all ranks have at a step."""
    draw = torch.Generator().manual_seed(100 + step)
    for parameter in parameters:
        gradient = torch.randn(parameter.shape, generator=draw).to(parameter.dtype)
        if parameter.requires_grad:
            parameter.grad = gradient


def same_bits(all_: Sequence[Parameters]) -> bool:
    """Say whether several sets of parameters have the same bits."""
    return all(
        tensor.dtype == first.dtype and torch.equal(tensor, first)
        for other in all_[1:]
        for tensor, first in zip(other, all_[0], strict=True)
    )


class Ranks:
    """An optimizer at every rank, and the one that it has to equal.

    Attributes:
        parameters: by rank.
        zeros: by rank.
        wanted: the parameters of one rank.
        alone: its optimizer.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        kind: type[torch.optim.Optimizer],
        make: Callable[[], Parameters] = make_parameters,
        *,
        as_views: bool = False,
        **options: Any,
    ) -> None:
        self.wanted = make()
        self.alone = kind(self.wanted, **options)
        self.parameters = [make() for _ in groups]
        self.zeros = [
            Zero(mine, kind, group, parameters_as_bucket_view=as_views, **options)
            for mine, group in zip(self.parameters, groups, strict=True)
        ]

    def give_gradients(self, step: int = 0) -> None:
        for parameters in (self.wanted, *self.parameters):
            give_gradients(parameters, step)

    async def step(self, step: int = 0) -> None:
        """Step all, and compare."""
        self.give_gradients(step)
        self.alone.step()
        await asyncio.gather(*(zero.step() for zero in self.zeros))
        assert self.are_equal()

    def are_equal(self) -> bool:
        return same_bits([self.wanted, *self.parameters])

    async def consolidate(self, to: int) -> Any:
        """Return the state of all ranks."""
        await asyncio.gather(*(zero.consolidate_state_dict(to) for zero in self.zeros))
        return self.zeros[to].state_dict()

    def load(self, state: Any) -> None:
        """Load a state at every rank, and in the optimizer of one."""
        for zero in self.zeros:
            zero.load_state_dict(state)
        self.alone.load_state_dict(copy.deepcopy(state))

    def begin_at(self, values: Sequence[torch.Tensor]) -> None:
        """Set all parameters."""
        with torch.no_grad():
            for parameters in (self.wanted, *self.parameters):
                for parameter, value in zip(parameters, values, strict=True):
                    parameter.copy_(value)
