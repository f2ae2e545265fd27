"""One process of `bench_training_path`: steps one after the other, traced or not.

The program on asyncrpc awaits; that of torch and of the facade is one and the same.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import torch

import asyncrpc
from tests.bench import training as t
from tests.bench import training_path as path
from tests.bench import workloads as w
from tests.bench.processes import choose_core, report
from tests.bench.sides import pair, training_asyncrpc
from tests.bench.sides.asyncrpc_side import with_spin
from tests.bench.sides.blocking import facade_names, torch_names
from tests.bench.sides.side import parser_of_process
from tests.bench.tracing import mark, taken_marks
from tests.bench.training_path import Place

WARM_UPS = 150


def awaiting(options: argparse.Namespace) -> None:
    """Run one process of asyncrpc."""

    async def lead_here(peer: asyncrpc.Peer, _: argparse.Namespace) -> None:
        await lead(options, await awaiting_step(options), peer.call)

    spin = with_spin(options.spin) if options.spin else None
    pair.run(options, lead_here, of_worker=spin)


async def awaiting_step(options: argparse.Namespace) -> Callable[[], Awaitable[None]]:
    """Return a training step of asyncrpc."""
    layer = asyncrpc.remote(w.CALLEE, layer_kind(options))
    parameters = await asyncrpc.rpc_async(
        w.CALLEE, training_asyncrpc.parameter_rrefs, args=(layer,)
    )
    optimizer = asyncrpc.optim.DistributedOptimizer(
        sgd_kind(options), parameters, lr=t.LEARNING_RATE
    )
    sent = torch.randn(t.BATCH, t.FEATURES)

    async def plain() -> None:
        await training_asyncrpc.step_apart([layer], optimizer, sent)

    async def traced() -> None:
        marked = path.marked
        mark(Place.BEGIN)
        async with asyncrpc.autograd.context() as context:
            mark(Place.OPENED)
            rows = await layer.rpc_async().forward(sent)
            mark(Place.ANSWERED)
            loss = marked(rows, Place.GRADIENT).pow(2).mean()
            mark(Place.LOSS)
            await asyncrpc.autograd.backward(context, [loss])
            mark(Place.PASSED)
            await optimizer.step(context)
            mark(Place.STEPPED)
        mark(Place.END)

    return traced if options.traced else plain


def blocking(options: argparse.Namespace, names: Any) -> None:
    """Run one process of torch, or of the facade under its names."""
    names.rpc.init_rpc(
        (w.CALLER, w.CALLEE)[options.rank],
        rank=options.rank,
        world_size=2,
        rpc_backend_options=names.rpc.TensorPipeRpcBackendOptions(
            init_method=f"tcp://127.0.0.1:{options.port}"
        ),
    )
    if options.rank == 0:
        step = blocking_step(options, names)

        async def call(function: Any) -> Any:
            return names.rpc.rpc_sync(w.CALLEE, function)

        async def waited() -> None:
            step()

        asyncio.run(lead(options, waited, call))
    names.rpc.shutdown()


def blocking_step(options: argparse.Namespace, names: Any) -> Callable[[], None]:
    """Return a training step of torch's."""
    layer = names.rpc.remote(w.CALLEE, layer_kind(options))
    optimizer_kind = sgd_kind(options) if names.marks_steps else torch.optim.SGD
    parameters = names.rpc.rpc_sync(w.CALLEE, names.parameter_rrefs, args=(layer,))
    optimizer = names.optimizer(optimizer_kind, parameters, lr=t.LEARNING_RATE)
    sent = torch.randn(t.BATCH, t.FEATURES)

    def plain() -> None:
        with names.context() as context_id:
            rows = layer.rpc_sync().forward(sent)
            names.backward(context_id, [rows.pow(2).mean()])
            optimizer.step(context_id)

    def traced() -> None:
        marked = path.marked
        mark(Place.BEGIN)
        with names.context() as context_id:
            mark(Place.OPENED)
            rows = layer.rpc_sync().forward(sent)
            mark(Place.ANSWERED)
            loss = marked(rows, Place.GRADIENT).pow(2).mean()
            mark(Place.LOSS)
            names.backward(context_id, [loss])
            mark(Place.PASSED)
            optimizer.step(context_id)
            mark(Place.STEPPED)
        mark(Place.END)

    return traced if options.traced else plain


def layer_kind(options: argparse.Namespace) -> type[torch.nn.Module]:
    return path.TracedLayer if options.traced else w.Layer


def sgd_kind(options: argparse.Namespace) -> type[torch.optim.SGD]:
    return path.TracedSGD if options.traced else torch.optim.SGD


async def lead(
    options: argparse.Namespace,
    step: Callable[[], Awaitable[None]],
    call: Callable[..., Awaitable[Any]],
) -> None:
    """Make the steps, and report what was found of them."""
    for _ in range(WARM_UPS):
        await step()
    taken_marks()
    await call(taken_marks)
    before = path.usage(), await call(path.usage)
    now, times_us = time.perf_counter_ns, []
    for _ in range(options.steps):
        start_ns = now()
        await step()
        times_us.append((now() - start_ns) / 1000)
    after = path.usage(), await call(path.usage)
    used = [
        [(late - early) / options.steps for early, late in zip(*pair, strict=True)]
        for pair in zip(before, after, strict=True)
    ]
    report("usage", *used)
    report("times", times_us)
    report("marks", taken_marks() + await call(taken_marks))


def main() -> None:
    parser = parser_of_process()
    parser.add_argument("--side", choices=("asyncrpc", "facade", "torch"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--cores", default="free")
    parser.add_argument("--spin", default="")
    parser.add_argument("--traced", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    choose_core(options.rank, options.cores)
    if options.side == "asyncrpc":
        awaiting(options)
    else:
        names = facade_names() if options.side == "facade" else torch_names()
        blocking(options, names)


if __name__ == "__main__":
    main()
