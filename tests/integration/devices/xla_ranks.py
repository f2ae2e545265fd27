"""One rank of a program on XLA devices; its processes are started in several ways."""

from __future__ import annotations

import asyncio
import copy
import sys

import pytest
import torch
from torch import nn

import asyncrpc
from asyncrpc import Group, devices, xla
from asyncrpc.ddp import DistributedDataParallel

STEPS = 3


def net() -> nn.Module:
    torch.manual_seed(xla.global_ordinal())
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def batch(rank: int, step: int) -> torch.Tensor:
    numbers = xla.generator(step, replica=rank)
    return torch.randn(5, 6, generator=numbers)


async def train(group: Group, device: str, module: nn.Module) -> list[torch.Tensor]:
    """Train together on a device; return the parameters."""
    await devices.run(module.to, device)
    model = await DistributedDataParallel(
        module, group, gradient_as_bucket_view=True, first_bucket_cap_mb=1e-4
    )
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):

        def loss(step: int = step) -> torch.Tensor:
            optimizer.zero_grad(set_to_none=True)
            output: torch.Tensor = model(batch(group.rank, step).to(device))
            return output.square().mean()

        await model.backward(await devices.run(loss))
        await devices.run(optimizer.step)
    model.close()
    parameters = list(module.parameters())
    return await devices.run(
        lambda: [parameter.detach().cpu() for parameter in parameters]
    )


async def check(worker: asyncrpc.Worker) -> None:
    async with Group(worker) as group:
        size, rank = group.size, group.rank
        assert (rank, size) == (xla.global_ordinal(), xla.world_size())
        ones = await devices.run(lambda: torch.full((3,), rank + 1.0, device="xla"))
        assert str(ones.device) == xla.device()
        total = await group.all_reduce(ones)
        wanted = [size * (size + 1) / 2] * 3
        assert (await devices.run(total.tolist)) == wanted
        module = net()
        await xla.broadcast_master_param(module, group)
        plain = await train(group, "cpu", copy.deepcopy(module))
        weights = await train(group, xla.device(), module)
        for mine, other in zip(weights, plain, strict=True):
            assert torch.allclose(mine, other, rtol=1e-5, atol=1e-6), (mine, other)
        await refused_where_it_would_diverge(module, size)
        sys.stdout.write(f"rank {rank} of {size}: as on the host\n")


async def refused_where_it_would_diverge(module: nn.Module, size: int) -> None:
    """The device's own step works for one replica, and says so for several here."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    if size == 1:
        await devices.run(xla.optimizer_step, optimizer)
        return
    with pytest.raises(asyncrpc.UsageError, match=r"own way|CPU cannot reduce"):
        await devices.run(xla.optimizer_step, optimizer)


async def main(_: int = 0) -> None:
    options = asyncrpc.Options(devices=asyncrpc.DeviceOptions(names=(xla.device(),)))
    name = f"replica{xla.global_ordinal()}"
    async with asyncrpc.Worker(name, rendezvous="xla://", options=options) as worker:
        await check(worker)


async def fail(rank: int) -> None:
    if rank:
        raise ValueError("this one fails")
    await asyncio.sleep(1000)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        xla.launch(fail, nprocs=int(sys.argv[1]))
    elif len(sys.argv) > 1:
        xla.launch(main, nprocs=int(sys.argv[1]))
    else:
        asyncio.run(main())
