"""Workers with modules, the same in one process, and steps of both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from asyncrpc import LivenessOptions, NetworkOptions, Options, RRef, Worker
from asyncrpc.autograd import backward, context
from asyncrpc.core.ids import WorkerId
from asyncrpc.core.optim.service import OptimizerService
from asyncrpc.optim import DistributedOptimizer
from asyncrpc.testing import Cluster, acting_as
from asyncrpc.testing.network import Network
from tests.inner_state import turns_of
from tests.numerics.remote import Layer, Scale, Tensors, parameters_there

STEPS = 5
SHAPES = ((5, 7, 1), (7, 4, 2), (4, 2, 3))


@dataclass
class Group:
    """Three workers, the first of which is the current one and has no stage here."""

    workers: list[Worker]
    modules: list[RRef[nn.Module]]
    parameters: list[RRef[nn.Parameter]]

    async def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self.modules:
            x = await module.rpc_async()(x)
        return x

    async def weights(self) -> Tensors:
        by_module = [await module.rpc_async().weights() for module in self.modules]
        return [weight for weights in by_module for weight in weights]


async def make(
    workers: list[Worker], on: str, module: Callable[..., nn.Module], *args: Any
) -> Group:
    """Make a module on each of the workers `on`."""
    modules = []
    for number, name in enumerate(on):
        arguments = args[number] if args else ()
        modules.append(workers[0].peer(name).remote(module, *arguments))
    by_module = [await parameters_there(module) for module in modules]
    return Group(
        workers, modules, [reference for group in by_module for reference in group]
    )


@asynccontextmanager
async def group_of(
    on: str,
    module: Callable[..., nn.Module] = Scale,
    *args: Any,
    network: Network | None = None,
) -> AsyncIterator[Group]:
    # Some networks here are slower than any that a worker would put up with.
    patient = Options(
        network=NetworkOptions(connect_timeout_s=120, handshake_timeout_s=120),
        liveness=LivenessOptions(lost_after_s=120),
    )
    options = patient if network else None
    async with Cluster(3, network=network or "mem", options=options) as workers:
        with acting_as(workers[0]):
            group = await make(workers, on, module, *args)
            yield group
            group.modules.clear()
            group.parameters.clear()


def layers(on: str) -> Any:
    return group_of(on, Layer, *SHAPES[: len(on)])


def one_process(
    count: int, prepare: Callable[[nn.Sequential], torch.optim.Optimizer]
) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = nn.Sequential(*(Layer(*shape) for shape in SHAPES[:count]))
    return model, prepare(model)


def loss_of(out: torch.Tensor) -> torch.Tensor:
    return (out * torch.arange(1, out.shape[1] + 1, dtype=torch.float64)).sum()


def inputs(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(6, 5, generator=generator, dtype=torch.float64)


def local_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    loss_of(model(inputs(step))).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


async def remote_step(
    group: Group, optimizer: DistributedOptimizer, step: int, **options: Any
) -> Any:
    async with context() as ctx:
        await backward(ctx, [loss_of(await group.forward(inputs(step)))])
        return await optimizer.step(ctx, **options)


def assert_same(weights: Tensors, model: nn.Module) -> None:
    for weight, wanted in zip(weights, model.parameters(), strict=True):
        assert torch.equal(weight, wanted)


async def step_on_ones(
    group: Group, optimizer: DistributedOptimizer, factor: float = 1.0, **options: Any
) -> Any:
    async with context() as ctx:
        x = torch.tensor(factor, dtype=torch.float64)
        outs = [await module.rpc_async()(x) for module in group.modules]
        await backward(ctx, [torch.cat(outs).sum()])
        return await optimizer.step(ctx, **options)


def optimizers_of(worker: Worker) -> OptimizerService:
    service = worker.parts.service("optim")
    assert isinstance(service, OptimizerService)
    return service


def turns_in(workers: list[Worker]) -> list[int]:
    """Return how many steps run, are kept or wait on each worker."""
    return [turns_of(optimizers_of(worker)) for worker in workers]


def loss_of_a_peer(worker: Worker) -> asyncio.Event:
    """Return what is set when the parts of a worker have been told of a loss."""
    lost = asyncio.Event()
    worker.parts.add_service(_Watch(lost))
    return lost


class _Watch:
    """A service that comes after the worker's own, so that those were told before."""

    name = "watch"
    routes = ()

    def __init__(self, lost: asyncio.Event) -> None:
        self._lost = lost

    def on_peer_lost(self, peer: WorkerId, reason: str) -> None:
        self._lost.set()

    async def close(self) -> None:
        self._lost.set()
