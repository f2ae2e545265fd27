"""A module within a distributed context, whose backward pass goes through a peer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from torch import nn

from asyncrpc import Group, Worker, autograd
from asyncrpc.ddp import DistributedDataParallel
from asyncrpc.errors import AutogradError
from asyncrpc.testing import Cluster, acting_as
from tests.integration.ddp.ranks import loss_of

STEPS = 3


class Sides(nn.Module):
    """An encoder before a remote call, a head behind it, and a scale on both sides."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.encoder = nn.Linear(3, 3)
        self.head = nn.Linear(3, 2)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, rows: torch.Tensor, side: str) -> torch.Tensor:
        """Map `(batch, 3)` by one side."""
        result: torch.Tensor = self.get_submodule(side)(rows) * self.scale
        return result


def doubled(rows: torch.Tensor) -> torch.Tensor:
    return rows * 2


def rows_of(rank: int, step: int) -> torch.Tensor:
    return torch.arange(6.0).view(2, 3).sin() + rank + step


async def gradients(
    worker: Worker, group: Group, options: dict[str, bool]
) -> list[torch.Tensor]:
    """Return the gradients of the last step."""
    module = Sides()
    model = await DistributedDataParallel(module, group, **options)  # type: ignore[arg-type]  # bools alone
    found: list[torch.Tensor] = []
    for step in range(STEPS):
        async with autograd.context() as context:
            hidden = model(rows_of(group.rank, step), "encoder")
            hidden = await worker.peer("c").call(doubled, hidden)
            await autograd.backward(context, [loss_of(model(hidden, "head"))])
            by_parameter = autograd.get_gradients(context)
            found = [by_parameter[one].clone() for one in module.parameters()]
    return found


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_as_bucket_view": False}, {"find_unused_parameters": True}],
    ids=["views", "own memory", "unused"],
)
async def test_a_module_on_both_sides_of_a_call_is_reduced(
    options: dict[str, bool],
) -> None:
    async with Cluster(3) as workers:
        groups = [Group(worker, ["a", "b"], timeout_s=60.0) for worker in workers[:2]]

        async def run(rank: int) -> Any:
            with acting_as(workers[rank]):
                return await gradients(workers[rank], groups[rank], options)

        ranks = await asyncio.gather(*(asyncio.create_task(run(r)) for r in range(2)))
    alone = Sides()
    for rank in range(2):
        hidden = doubled(alone(rows_of(rank, STEPS - 1), "encoder"))
        torch.autograd.backward(loss_of(alone(hidden, "head")) / 2)
    for grads in ranks:
        for grad, parameter in zip(grads, alone.parameters(), strict=True):
            assert parameter.grad is not None
            assert torch.allclose(grad, parameter.grad, rtol=1e-5, atol=1e-6)


async def test_a_pass_that_ends_at_a_received_tensor_is_refused() -> None:
    """It would send nothing to the peer, whose gradients would be lost."""
    async with Cluster(2) as workers:

        async def run() -> None:
            model = await DistributedDataParallel(Sides(), Group(workers[0], ["a"]))
            async with autograd.context():
                hidden = model(rows_of(0, 0), "encoder")
                hidden = await workers[0].peer("b").call(doubled, hidden)
                await model.backward(loss_of(model(hidden, "head")))

        with acting_as(workers[0]), pytest.raises(AutogradError, match="worker 'b'"):
            await run()
