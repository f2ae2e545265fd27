"""A model split over workers and shared by trainers trains as it would in one process.

Two stages and two trainers, each a worker, in one process and in four.  The trainers
take turns, so the numbers are determined: losses, gradients and weights are those of
one process with two optimizers on one model, to 1e-12 in double precision.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest
import torch
from torch import nn

from asyncrpc import RRef, Worker
from asyncrpc.testing import Cluster, ProcessCluster, acting_as
from tests.numerics.remote import Layer, Tensors, Trainer

SHAPES = ((5, 7, 1), (7, 2, 2))  # inputs, outputs and seed of each stage
ROUNDS = 4
Records = list[tuple[float, Tensors]]


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)

    def draw(columns: int) -> torch.Tensor:
        return torch.randn(6, columns, generator=generator, dtype=torch.float64)

    return [(draw(5), draw(2)) for _ in range(2 * ROUNDS)]


def in_one_process() -> tuple[Records, Tensors]:
    model = nn.Sequential(*(Layer(*shape) for shape in SHAPES))
    optimizers = [
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for _ in range(2)
    ]
    records = []
    for number, (x, y) in enumerate(batches()):
        model.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        gradients = [
            parameter.grad
            for parameter in model.parameters()
            if parameter.grad is not None
        ]
        optimizers[number % 2].step()
        records.append((loss.item(), gradients))
    return records, [parameter.detach() for parameter in model.parameters()]


async def distributed(worker: Worker) -> tuple[Records, Tensors]:
    stages: list[RRef[nn.Module]] = [
        worker.peer(f"stage{number}").remote(Layer, *shape)
        for number, shape in enumerate(SHAPES)
    ]
    here = Trainer(stages)
    there = worker.peer("trainer1").remote(Trainer, stages)
    records = []
    for number, (x, y) in enumerate(batches()):
        turn = there.rpc_async().step if number % 2 else here.step
        records.append(await turn(x, y))
    weights = [await stage.rpc_async().weights() for stage in stages]
    return records, [weight for stage in weights for weight in stage]


@asynccontextmanager
async def one_process() -> AsyncIterator[Worker]:
    names = ("trainer0", "stage0", "stage1", "trainer1")
    async with Cluster(names=names) as workers:
        yield workers[0]


def four_processes() -> AbstractAsyncContextManager[Worker]:
    names = ("stage0", "stage1", "trainer1")
    return ProcessCluster(names, name="trainer0", method="forkserver")


@pytest.mark.parametrize("group", [one_process, four_processes])
async def test_split_model_trains_as_in_one_process(
    group: Callable[[], AbstractAsyncContextManager[Worker]],
) -> None:
    wanted_records, wanted_weights = in_one_process()
    async with group() as worker:
        with acting_as(worker):
            records, weights = await distributed(worker)
    torch.testing.assert_close(records, wanted_records, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(weights, wanted_weights, rtol=1e-12, atol=1e-12)
    assert records[-1][0] < records[0][0]
