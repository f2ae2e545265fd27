"""Training steps and backward passes, as the tutorials of torch's RPC write them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed import autograd, optim, rpc

from tests.bench import training as t
from tests.bench import workloads as w
from tests.bench.harness import Budget, measure, per_second

Measured = Callable[[Budget], list[float]]

# torch does not type these.
context: Any = autograd.context
backward: Any = autograd.backward  # type: ignore[attr-defined]
make_optimizer: Any = optim.DistributedOptimizer


def parameter_rrefs(rref: rpc.RRef[nn.Module]) -> list[rpc.RRef[torch.Tensor]]:
    return [rpc.RRef(parameter) for parameter in rref.local_value().parameters()]


def optimizer_of(layers: Sequence[Any]) -> Any:
    parameters = []
    for layer in layers:
        owner = layer.owner_name()
        parameters += rpc.rpc_sync(owner, parameter_rrefs, args=(layer,))
    return make_optimizer(torch.optim.SGD, parameters, lr=t.LEARNING_RATE)


def step(layers: Sequence[Any], optimizer: Any, rows: torch.Tensor) -> None:
    """Go through the layers, back, and let the optimizer step."""
    with context() as context_id:
        for layer in layers:
            rows = layer.rpc_sync().forward(rows)
        backward(context_id, [rows.pow(2).mean()])
        if optimizer is not None:
            optimizer.step(context_id)


def steps(rows: torch.Tensor, *layers: tuple[str, type[nn.Module]]) -> Measured:
    """Measure training steps of layers on workers."""

    def run(budget: Budget) -> list[float]:
        references = [rpc.remote(worker, kind) for worker, kind in layers]
        optimizer = optimizer_of(references)
        return [per_second(measure(lambda: step(references, optimizer, rows), budget))]

    return run


def passes(kind: type[nn.Module], calls: int) -> Measured:
    """Measure forward and backward, without an optimizer, of calls in a row."""

    def run(budget: Budget) -> list[float]:
        layer = rpc.remote(w.CALLEE, kind)
        rows = torch.ones(8, requires_grad=True)
        times_s = measure(lambda: step([layer] * calls, None, rows), budget)
        return [per_second(times_s)]

    return run


def train(layer: Any, seconds: float) -> int:
    """Train, on a trainer; return how many steps it made in so many seconds."""
    optimizer = optimizer_of([layer])
    rows = torch.randn(t.SERVER_BATCH, t.SERVER_FEATURES)
    for _ in range(3):
        step([layer], optimizer, rows)
    count, end_s = 0, time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        step([layer], optimizer, rows)
        count += 1
    return count


def trainers(names: Sequence[str]) -> Measured:
    def run(budget: Budget) -> list[float]:
        layer = rpc.remote(w.CALLEE, t.Square, args=(t.SERVER_FEATURES,))
        calls = [
            rpc.rpc_async(name, train, args=(layer, budget.seconds)) for name in names
        ]
        return [sum(call.wait() for call in calls) / budget.seconds]

    return run


def measured() -> Mapping[str, Measured]:
    """Return what is measured, by its name."""
    rows = torch.randn(t.BATCH, t.FEATURES)
    names = [w.CALLEE, *(f"{w.CALLER}{rank}" for rank in range(2, 2 + t.TRAINERS))]
    return {
        "autograd": steps(rows, (w.CALLEE, w.Layer)),
        "train_two": steps(rows, (w.CALLEE, t.TwoLayers)),
        "train_chain": steps(rows, *((name, t.Square) for name in names[:3])),
        "train_server": trainers(names[1:]),
        "train_crossings": passes(t.Point, t.CROSSINGS // 2),
        "train_nodes": passes(t.Long, 1),
    }
