"""asyncrpc, as its documentation uses it: awaited, on the fastest event loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import torch

import asyncrpc
from tests.bench import workloads as w
from tests.bench.harness import (
    Budget,
    gb_per_second,
    measure_async,
    p50_p99_us,
    per_second,
)
from tests.bench.sides.side import Arguments, parse, report

Measured = Callable[[Budget], Awaitable[list[float]]]


def latency(
    peer: asyncrpc.Peer, function: Callable[..., Any], *args: object
) -> Measured:
    async def run(budget: Budget) -> list[float]:
        call = partial(peer.call, function, *args)
        return p50_p99_us(await measure_async(call, budget))

    return run


def outstanding(function: Callable[..., Any]) -> Measured:
    async def run(budget: Budget) -> list[float]:
        start = partial(asyncrpc.rpc_async, w.CALLEE, function)
        calls = deque(start() for _ in range(w.OUTSTANDING))

        async def one_more() -> None:
            await calls.popleft()
            calls.append(start())

        times_s = await measure_async(one_more, budget, warm_ups=w.OUTSTANDING)
        for call in calls:
            await call
        return [per_second(times_s)]

    return run


def bandwidth(
    peer: asyncrpc.Peer, function: Callable[..., Any], size_mib: int
) -> Measured:
    async def run(budget: Budget) -> list[float]:
        tensor = torch.ones((size_mib << 20) // 4)
        call = partial(peer.call, function, tensor)
        warm_ups = 1 if size_mib > 100 else 3
        times_s = await measure_async(call, budget, warm_ups=warm_ups)
        return [gb_per_second(times_s, tensor.nbytes)]

    return run


async def references(budget: Budget) -> list[float]:
    async def one() -> None:
        rref = asyncrpc.remote(w.CALLEE, w.Counter)
        assert await rref.rpc_async().add(2) == 2
        await rref.to_here()

    return [per_second(await measure_async(one, budget))]


async def parameter_rrefs(
    rref: asyncrpc.RRef[w.Layer],
) -> list[asyncrpc.RRef[torch.Tensor]]:
    layer = await rref.to_here()  # the layer itself: this runs on its owner
    return [asyncrpc.RRef(parameter) for parameter in layer.parameters()]


async def training(budget: Budget) -> list[float]:
    layer = asyncrpc.remote(w.CALLEE, w.Layer)
    parameters = await asyncrpc.rpc_async(w.CALLEE, parameter_rrefs, args=(layer,))
    optimizer = asyncrpc.optim.DistributedOptimizer(
        torch.optim.SGD, parameters, lr=w.LEARNING_RATE
    )
    rows = torch.randn(w.BATCH, w.FEATURES)

    async def step() -> None:
        async with asyncrpc.autograd.context() as context:
            loss = (await layer.rpc_async().forward(rows)).pow(2).mean()
            await asyncrpc.autograd.backward(context, [loss])
            await optimizer.step(context)

    return [per_second(await measure_async(step, budget))]


def measured(peer: asyncrpc.Peer) -> Mapping[str, Measured]:
    found: dict[str, Measured] = {
        "call_async": latency(peer, w.nothing_async),
        "call_def": latency(peer, w.nothing),
        "tensor_add": latency(peer, w.add_one, torch.ones(w.KIB_FLOATS)),
        "many_async": outstanding(w.nothing_async),
        "many_def": outstanding(w.nothing),
        "rref": references,
        "autograd": training,
    }
    for size in w.SIZES_MIB:
        found[f"send_{size}"] = bandwidth(peer, w.shape_of, size)
        found[f"echo_{size}"] = bandwidth(peer, w.echo, size)
    return found


async def main(arguments: Arguments) -> None:
    torch.set_num_threads(1)
    async with asyncrpc.init_rpc(
        (w.CALLER, w.CALLEE)[arguments.rank],
        rank=arguments.rank,
        world_size=2,
        rendezvous=f"tcp://127.0.0.1:{arguments.port}",
    ) as worker:
        if arguments.rank == 0:
            found = measured(worker.peer(w.CALLEE))
            for name in arguments.workloads:
                report(name, await found[name](arguments.budget_for(name)))
        await worker.barrier()


if __name__ == "__main__":
    asyncrpc.run(main(parse()))
