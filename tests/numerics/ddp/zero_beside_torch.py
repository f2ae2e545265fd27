"""What one rank does to compare ZeRO with torch's, and with an optimizer of one rank.

Each process is a rank of a `Group` and of torch's default group, over gloo.  All have
the same gradients, as after a backward pass whose gradients were averaged.
"""

from __future__ import annotations

import asyncio
import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero

from asyncrpc import Group
from asyncrpc.ddp import ZeroRedundancyOptimizer
from tests.numerics.ddp.beside import both

# Of all sizes: empty, a scalar, small ones that are packed, one that is sent alone.
SHAPES = ((33, 20), (33,), (0,), (), (7, 3, 2), (512, 513), (5,), (64, 65), (1,))


@dataclass(frozen=True)
class Case:
    """An optimizer and its options."""

    optimizer: type[torch.optim.Optimizer]
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    as_views: bool = False


def make_parameters(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    draw = torch.Generator().manual_seed(1)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=draw).to(dtype))
        for shape in SHAPES
    ]


def grouped(parameters: Sequence[torch.Tensor], scale: float) -> list[dict[str, Any]]:
    """Two groups; the second has an option of its own."""
    return [{"params": parameters[:4]}, {"params": parameters[4:], "lr": 0.01 * scale}]


def give_gradients(parameters: Sequence[torch.Tensor], step: int) -> None:
    """Give each its gradient of a step, but one none at first."""
    draw = torch.Generator().manual_seed(1000 + step)
    for place, parameter in enumerate(parameters):
        gradient = torch.randn(parameter.shape, generator=draw).to(parameter.dtype)
        parameter.grad = None if place == 4 and step < 2 else gradient


def assert_equal(actual: Any, wanted: Any, where: str = "") -> None:
    """Compare trees of tensors and values, bit by bit."""
    if isinstance(wanted, torch.Tensor):
        assert isinstance(actual, torch.Tensor), where
        assert actual.dtype == wanted.dtype, where
        assert torch.equal(actual, wanted), where
    elif isinstance(wanted, dict):
        assert actual.keys() == wanted.keys(), where
        for key, value in wanted.items():
            assert_equal(actual[key], value, f"{where}[{key!r}]")
    elif isinstance(wanted, list | tuple):
        assert len(actual) == len(wanted), where
        for place, (element, other) in enumerate(zip(actual, wanted, strict=True)):
            assert_equal(element, other, f"{where}[{place}]")
    else:
        assert actual == wanted, where


class Sides:
    """The same parameters three times: ours, torch's ZeRO's, and of one rank."""

    def __init__(self, group: Group, case: Case) -> None:
        self.ours, self.torchs, self.plain = (
            make_parameters(case.dtype) for _ in range(3)
        )
        self.zero = ZeroRedundancyOptimizer(
            grouped(self.ours, 2.0),
            case.optimizer,
            group,
            parameters_as_bucket_view=case.as_views,
            **case.options,
        )
        self.torch_zero: Any = TorchZero(
            grouped(self.torchs, 2.0),
            case.optimizer,
            parameters_as_bucket_view=case.as_views,
            **case.options,
        )
        self.alone = case.optimizer(grouped(self.plain, 2.0), **case.options)

    async def step(self, step: int) -> None:
        """Step all sides, and find the same bits everywhere."""
        for parameters in (self.ours, self.torchs, self.plain):
            give_gradients(parameters, step)
        for optimizer in (self.zero, self.torch_zero, self.alone):
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * 0.9
        await self.zero.step()
        await asyncio.to_thread(self.torch_zero.step)
        self.alone.step()
        assert_equal(self.ours, self.plain, f"step {step}: one rank's")
        assert_equal(self.ours, self.torchs, f"step {step}: torch's")

    async def states(self, to: int) -> Any:
        """Bring the states together; they are that of one rank."""
        await self.zero.consolidate_state_dict(to)
        if self.zero.group.rank != to:
            return None
        state = self.zero.state_dict()
        assert_equal(state, self.alone.state_dict(), "state of one rank")
        return state

    async def torchs_states(self, to: int) -> None:
        """Find that the states are those which torch's brings together."""
        state = await self.states(to)
        await asyncio.to_thread(self.torch_zero.consolidate_state_dict, to)
        if state is not None:
            assert_equal(state, self.torch_zero.state_dict(), "torch's state")


async def compare(group: Group, case: Case) -> None:
    """Train, save at a rank, load at the others and in other optimizers, train on."""
    sides = Sides(group, case)
    for step in range(3):
        await sides.step(step)
    root = group.size - 1
    await sides.states(root)
    # We take torch's state of one rank; that one, at the root, takes ours.  torch goes
    # on with the very tensors that it loads, so each of its optimizers gets a copy.
    saved = sides.alone.state_dict()
    ours = sides.zero.state_dict() if group.rank == root else saved
    again = Sides(group, case)
    again.zero.load_state_dict(saved)
    again.alone.load_state_dict(copy.deepcopy(ours))
    again.torch_zero.load_state_dict(copy.deepcopy(saved))
    with torch.no_grad():
        for parameters in (again.ours, again.torchs, again.plain):
            for parameter, value in zip(parameters, sides.plain, strict=True):
                parameter.copy_(value)
    for step in range(3, 6):
        await again.step(step)
    if not case.as_views:  # it takes torch a second and a half
        await again.torchs_states(0)
    for side in (sides, again):
        side.zero.close()


async def play(rank: int, folder: str, cases: Sequence[Case]) -> None:
    """Play cases at one rank; what every process runs."""
    warnings.simplefilter("ignore", FutureWarning)
    async with both(rank, folder) as group:
        for case in cases:
            try:
                await compare(group, case)
            except AssertionError as error:
                raise AssertionError(f"{case}: {error}") from error
