"""Training steps and backward passes, as asyncrpc's documentation writes them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

import asyncrpc
from tests.bench import training as t
from tests.bench import workloads as w
from tests.bench.harness import Budget, measure_async, per_second

Measured = Callable[[Budget], Awaitable[list[float]]]
Layers = Sequence[asyncrpc.RRef[Any]]


async def parameter_rrefs(
    rref: asyncrpc.RRef[nn.Module],
) -> list[asyncrpc.RRef[torch.Tensor]]:
    layer = await rref.to_here()  # the layer itself: this runs on its owner
    return [asyncrpc.RRef(parameter) for parameter in layer.parameters()]


async def optimizer_of(layers: Layers) -> asyncrpc.optim.DistributedOptimizer:
    parameters = []
    for layer in layers:
        owner = layer.owner_name()
        parameters += await asyncrpc.rpc_async(owner, parameter_rrefs, args=(layer,))
    return asyncrpc.optim.DistributedOptimizer(
        torch.optim.SGD, parameters, lr=t.LEARNING_RATE
    )


async def step(
    layers: Layers,
    optimizer: asyncrpc.optim.DistributedOptimizer | None,
    rows: torch.Tensor,
) -> None:
    """Go through the layers, back, and let the optimizer step."""
    async with asyncrpc.autograd.context() as context:
        for layer in layers:
            rows = await layer.rpc_async().forward(rows)
        loss = rows.pow(2).mean()
        if optimizer is None:
            await asyncrpc.autograd.backward(context, loss)
        else:
            await optimizer.backward_and_step(context, loss)


async def step_apart(
    layers: Layers, optimizer: asyncrpc.optim.DistributedOptimizer, rows: torch.Tensor
) -> None:
    """Take the same step by two requests, as torch does."""
    async with asyncrpc.autograd.context() as context:
        for layer in layers:
            rows = await layer.rpc_async().forward(rows)
        await asyncrpc.autograd.backward(context, rows.pow(2).mean())
        await optimizer.step(context)


def steps(
    rows: torch.Tensor,
    *layers: tuple[str, type[nn.Module]],
    take: Callable[..., Awaitable[None]] = step,
) -> Measured:
    """Measure training steps of layers on workers."""

    async def run(budget: Budget) -> list[float]:
        references = [asyncrpc.remote(worker, kind) for worker, kind in layers]
        optimizer = await optimizer_of(references)
        times_s = await measure_async(lambda: take(references, optimizer, rows), budget)
        return [per_second(times_s)]

    return run


def passes(kind: type[nn.Module], calls: int) -> Measured:
    """Measure forward and backward, without an optimizer, of calls in a row."""

    async def run(budget: Budget) -> list[float]:
        layer = asyncrpc.remote(w.CALLEE, kind)
        rows = torch.ones(8, requires_grad=True)
        times_s = await measure_async(lambda: step([layer] * calls, None, rows), budget)
        return [per_second(times_s)]

    return run


async def train(layer: asyncrpc.RRef[t.Square], seconds: float) -> int:
    """Train, on a trainer; return how many steps it made in so many seconds."""
    optimizer = await optimizer_of([layer])
    rows = torch.randn(t.SERVER_BATCH, t.SERVER_FEATURES)
    for _ in range(3):
        await step([layer], optimizer, rows)
    count, end_s = 0, time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        await step([layer], optimizer, rows)
        count += 1
    return count


def trainers(names: Sequence[str]) -> Measured:
    async def run(budget: Budget) -> list[float]:
        layer = asyncrpc.remote(w.CALLEE, t.Square, args=(t.SERVER_FEATURES,))
        await layer
        counts = await asyncio.gather(
            *(
                asyncrpc.rpc_async(name, train, args=(layer, budget.seconds))
                for name in names
            )
        )
        return [sum(counts) / budget.seconds]

    return run


def measured() -> Mapping[str, Measured]:
    """Return what is measured, by its name."""
    rows = torch.randn(t.BATCH, t.FEATURES)
    names = [w.CALLEE, *(f"{w.CALLER}{rank}" for rank in range(2, 2 + t.TRAINERS))]
    return {
        "autograd": steps(rows, (w.CALLEE, w.Layer)),
        "autograd_apart": steps(rows, (w.CALLEE, w.Layer), take=step_apart),
        "train_two": steps(rows, (w.CALLEE, t.TwoLayers)),
        "train_chain": steps(rows, *((name, t.Square) for name in names[:3])),
        "train_server": trainers(names[1:]),
        "train_crossings": passes(t.Point, t.CROSSINGS // 2),
        "train_nodes": passes(t.Long, 1),
    }
