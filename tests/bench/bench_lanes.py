"""What do lanes give, and what does a small call wait for beside large payloads?

Two processes.  One way: a tensor to a function that returns its length.  Beside: a
small call, one at a time, while tensors of 256 MiB flow both ways on the same pair.
`0` lanes is the control connection alone; on `mem` both workers share one loop.

    $ python -m tests.bench.bench_lanes
    $ python -m tests.bench.bench_lanes --transports tcp --lanes 1 2 4
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from typing import NamedTuple

import torch

import asyncrpc
from asyncrpc import LimitOptions, NetworkOptions, Options, Worker
from asyncrpc.testing import Cluster, ProcessCluster
from asyncrpc.testing.cluster import Wires
from tests.bench.harness import Budget, gb_per_second, measure_async, p50_p99_us

SIZES_MIB = (1, 16, 256)
BESIDE_MIB = 256
IDLE, BESIDE = Budget(1.0), Budget(4.0)


class Figures(NamedTuple):
    """What one pair of workers gave."""

    gb_s: list[float]  # by size
    both_gb_s: float
    idle_us: list[float]  # p50, p99
    beside_us: list[float]

    def __str__(self) -> str:
        cells = [*(f"{rate:.2f}" for rate in self.gb_s), f"{self.both_gb_s:.2f}"]
        for p50, p99 in (self.idle_us, self.beside_us):
            cells.append(f"{p50:.0f} / {p99:.0f}")
        cells.append(f"{self.beside_us[1] / self.idle_us[1]:.1f}")
        return "".join(f"{cell:>14}" for cell in cells)


@asyncrpc.on_loop
def length(tensor: torch.Tensor) -> int:
    return tensor.numel()


async def add(left: int, right: int) -> int:
    return left + right


@asyncrpc.on_loop
def swap(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@contextlib.asynccontextmanager
async def pair(transport: Wires, lanes: int | None) -> AsyncIterator[Worker]:
    options = Options(
        network=NetworkOptions(bulk_lanes=lanes),
        limits=LimitOptions(shared_memory_bytes=0),
    )
    if transport == "mem":
        async with Cluster(2, options=options) as (worker, _):
            yield worker
        return
    async with ProcessCluster(["b"], transport=transport, options=options) as worker:
        yield worker


async def measure(transport: Wires, lanes: int | None) -> Figures:
    async with pair(transport, lanes) as worker:
        peer = worker.peer("b")
        gb_s = []
        for size_mib in SIZES_MIB:
            tensor = torch.ones(size_mib << 20, dtype=torch.uint8)
            times_s = await measure_async(
                partial(peer.call, length, tensor), IDLE, warm_ups=3
            )
            gb_s.append(gb_per_second(times_s, size_mib << 20))

        async def small() -> None:
            await peer.call(add, 1, 2)

        idle_us = p50_p99_us(await measure_async(small, IDLE))
        tensor = torch.ones(BESIDE_MIB << 20, dtype=torch.uint8)
        loop = asyncio.get_running_loop()
        ended_s: list[float] = []

        async def flow() -> None:
            while True:  # two of them: one goes there while the other comes back
                await peer.call(swap, tensor)
                ended_s.append(loop.time())

        flows = [asyncio.create_task(flow()) for _ in range(2)]
        await measure_async(small, Budget(0.5))
        ended_s.clear()
        start_s = loop.time()
        beside_us = p50_p99_us(await measure_async(small, BESIDE, warm_ups=0))
        both_gb_s = 0.0  # not one has come back
        if ended_s:
            moved_bytes = 2 * tensor.nbytes * len(ended_s)
            both_gb_s = moved_bytes / (ended_s[-1] - start_s) / 1e9
        for task in flows:
            task.cancel()
        await asyncio.gather(*flows, return_exceptions=True)
        return Figures(gb_s, both_gb_s, idle_us, beside_us)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transports", nargs="+", default=["tcp", "uds", "mem"])
    parser.add_argument("--lanes", nargs="+", type=int, default=[0, 1, 2, 4])
    chosen = parser.parse_args()
    heads = [f"{size} MiB, GB/s" for size in SIZES_MIB]
    heads += ["both ways", "idle us", "beside us", "p99 ratio"]
    print("transport lanes" + "".join(f"{head:>14}" for head in heads))
    for transport in chosen.transports:
        for lanes in chosen.lanes:
            figures = asyncrpc.run(measure(transport, lanes))
            print(f"{transport:>9} {lanes:>5}{figures}", flush=True)


if __name__ == "__main__":
    main()
