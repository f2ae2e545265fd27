"""Local SGD comes to what torch's does, step by step.

Over two ranks parameters have the same bits.  Over more, gloo adds in another order:
then they are the same to a few units of the dtype in which they are added.
"""

from __future__ import annotations

import asyncio
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as hooks
from torch.distributed.algorithms.model_averaging.averagers import (
    PeriodicModelAverager as TorchPeriodic,
)
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import (
    HierarchicalModelAverager as TorchHierarchical,
)
from torch.distributed.optim import PostLocalSGDOptimizer as TorchPostLocal

from asyncrpc import Group
from asyncrpc.ddp import (
    DistributedDataParallel,
    HierarchicalModelAverager,
    ModelAverager,
    PeriodicModelAverager,
    PostLocalSGDOptimizer,
    PostLocalSGDState,
    post_localSGD_hook,
)
from asyncrpc.multiprocessing import launch
from tests.numerics.ddp.beside import both
from tests.numerics.ddp.zero_beside_torch import assert_equal

STEPS = 9
MIXED = (torch.float32, torch.float64, torch.bfloat16)


@dataclass(frozen=True)
class Case:
    """An averager, and how close the parameters are.

    Attributes:
        levels: number of ranks by period; one level: the averager that has no others.
        warmup: steps before the first averaging.
        units: the largest difference, in units of the dtype of the largest element.
        goes_local: with a module and its hook: whether gradients are averaged over
            neighbours when the warm-up is over.
    """

    levels: tuple[tuple[int, int], ...]
    warmup: int = 0
    units: float = 0.0
    goes_local: bool = False


def averagers(group: Group, case: Case) -> tuple[ModelAverager, Any]:
    """Make ours and torch's."""
    if len(case.levels) == 1:
        ((period, _),) = case.levels
        return (
            PeriodicModelAverager(group, period, warmup_steps=case.warmup),
            TorchPeriodic(period, case.warmup),
        )
    return (
        HierarchicalModelAverager(group, dict(case.levels), warmup_steps=case.warmup),
        TorchHierarchical(OrderedDict(case.levels), case.warmup),  # type: ignore[no-untyped-call]  # torch's
    )


def check_close(
    ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor], case: Case, where: str
) -> None:
    if case.units == 0.0:
        assert_equal(list(ours), list(theirs), f"{case}: {where}")
        return
    for mine, its in zip(ours, theirs, strict=True):
        assert mine.dtype == its.dtype
        unit = torch.finfo(mine.dtype).eps * float(its.abs().max())
        assert float((mine - its).abs().max()) <= case.units * unit, where


async def check_same_at(
    group: Group, ranks: Sequence[int], parameters: Sequence[torch.Tensor]
) -> None:
    """Find the same bits at some ranks."""
    for parameter in parameters:
        gathered = await group.all_gather(parameter.detach())
        assert all(torch.equal(gathered[rank], parameter) for rank in ranks)


async def compare_averagers(group: Group, case: Case) -> None:
    """Step by step, with parameters of several dtypes, one without a gradient."""
    draw = torch.Generator().manual_seed(group.rank)
    shapes = ((3, 5), (40, 30), (7,), (), (300, 290), (2, 2))
    tensors = [
        torch.randn(shape, generator=draw).to(MIXED[place % 3])
        for place, shape in enumerate(shapes)
    ]
    ours, theirs = (
        [nn.Parameter(tensor.clone()) for tensor in tensors] for _ in range(2)
    )
    mine, other = averagers(group, case)
    for step in range(STEPS):
        for place, (parameter, same) in enumerate(zip(ours, theirs, strict=True)):
            change = torch.randn(parameter.shape, generator=draw).to(parameter.dtype)
            with torch.no_grad():
                parameter.add_(change)
                same.add_(change)
            if place != 2:
                parameter.grad = same.grad = change
        groups = [{"params": ours[:2]}, {"params": ours[2:]}]
        await mine.average_parameters(groups if step % 2 else ours)
        await asyncio.to_thread(other.average_parameters, theirs)
        assert mine.step == other.step
        check_close(ours, theirs, case, f"step {step}")
        due = [
            size
            for period, size in case.levels
            if step >= case.warmup
            and (step - (case.warmup if len(case.levels) == 1 else 0)) % period == 0
        ]
        if due:
            first = group.rank - group.rank % due[-1]
            ranks = range(first, first + due[-1])
            await check_same_at(group, ranks, ours[:2])
    mine.close()


class Net(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second = nn.Linear(12, 300), nn.Linear(300, 4)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map `(batch, 12)` to `(batch, 4)`."""
        result: torch.Tensor = self.second(self.first(rows).tanh())
        return result


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1000 * step + rank)
    loss: torch.Tensor = model(torch.randn(8, 12, generator=draw)).square().mean()
    return loss


async def compare_training(group: Group, case: Case) -> None:
    """Train a module with hook, optimizer and averager, and resume it."""
    pairs = [[at, at + 1] for at in range(0, group.size, 2)]
    theirs = [await asyncio.to_thread(dist.new_group, pair) for pair in pairs]
    pair = pairs[group.rank // 2]
    subgroup = group.subgroup(pair, name=f"{case}")
    model = await DistributedDataParallel(Net(), group)
    state = PostLocalSGDState(
        None, subgroup, case.warmup, post_local_gradient_allreduce=case.goes_local
    )
    model.register_comm_hook(state, post_localSGD_hook)
    torchs = await asyncio.to_thread(nn.parallel.DistributedDataParallel, Net())
    torchs.register_comm_hook(
        hooks.PostLocalSGDState(  # type: ignore[no-untyped-call]  # torch's
            None,
            theirs[group.rank // 2],
            case.warmup,
            post_local_gradient_allreduce=case.goes_local,
        ),
        hooks.post_localSGD_hook,
    )
    mine, other = averagers(group, case)
    ours: Any = PostLocalSGDOptimizer(sgd(model), mine)
    its: Any = TorchPostLocal(sgd(torchs), other)
    for step in range(STEPS):
        if step == STEPS - 3:
            # Each goes on from the state of the other.
            saved, kept = ours.state_dict(), its.state_dict()
            assert saved["step"] == kept["step"] == step
            ours = PostLocalSGDOptimizer(sgd(model), mine)
            mine.step = 0
            ours.load_state_dict(kept)
            its = TorchPostLocal(sgd(torchs), other)
            its.load_state_dict(saved)
            assert mine.step == step
        ours.zero_grad()
        await model.backward(loss_of(model, group.rank, step))
        await ours.step()
        its.zero_grad()
        await asyncio.to_thread(loss_of(torchs, group.rank, step).backward)
        await asyncio.to_thread(its.step)
        check_close(
            list(model.parameters()), list(torchs.parameters()), case, f"step {step}"
        )
    mine.close()
    model.close()
    subgroup.close()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


async def play(
    rank: int, folder: str, averaging: Sequence[Case], training: Sequence[Case]
) -> None:
    """Play cases at one rank; what every process runs."""
    warnings.simplefilter("ignore")  # torch's, of periods of 1
    async with both(rank, folder) as group:
        for case in averaging:
            await compare_averagers(group, case)
        for case in training:
            await compare_training(group, case)


MEANS = 2.0  # units: sums are made in double precision, but for the last digit
TRAINED = 16.0  # units: sums in float32, in steps that come after each other


@pytest.mark.slow
def test_two_ranks_match_torch_bitwise(tmp_path: Path) -> None:
    averaging = [
        Case(((2, 2),)),
        Case(((3, 2),), warmup=2),
        Case(((1, 2),), warmup=4),
        Case(((2, 1), (4, 2)), warmup=1),
    ]
    training = [Case(((2, 2),), warmup=3), Case(((2, 1), (3, 2)), goes_local=True)]
    launch(play, (str(tmp_path), averaging, training), 2, method="forkserver")


@pytest.mark.slow
def test_four_ranks_match_torch_closely(tmp_path: Path) -> None:
    averaging = [
        Case(((3, 4),), warmup=2, units=MEANS),
        Case(((2, 2), (4, 4)), warmup=1, units=MEANS),
        Case(((1, 1), (2, 2), (6, 4)), units=MEANS),
    ]
    training = [
        Case(((3, 4),), warmup=2, units=TRAINED),
        Case(((4, 2), (6, 4)), warmup=2, units=TRAINED, goes_local=True),
    ]
    launch(play, (str(tmp_path), averaging, training), 4, method="forkserver")
