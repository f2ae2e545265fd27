"""Calls between two workers of a gang, and between the same two actors by Ray.

    $ python -m tests.clusters.ray.beside

Both ways in one run, in turn, on the same two processes: each way has its share of
whatever else the host does.  The callee does nothing with what it gets; a tensor goes
there and comes back.  Then a tensor in Ray's object store, both ways, too.  For the
tables of docs/how-to/run-on-ray.md.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import ray
import torch

import asyncrpc
import asyncrpc.ray
from asyncrpc.ray import Gang

ROUNDS = 15
CALLS = {"nothing": 200, "1 MiB": 40, "16 MiB": 10}


def same(value: Any) -> Any:
    return value


async def echo(_: asyncrpc.Worker, value: Any) -> Any:
    return value


async def timed(calls: int, call: Callable[[], Awaitable[Any]]) -> float:
    """Return the microseconds of one call."""
    await call()
    begun = time.perf_counter()
    for _ in range(calls):
        await call()
    return (time.perf_counter() - begun) / calls * 1e6


async def measure(worker: asyncrpc.Worker, other: Any) -> dict[str, list[list[float]]]:
    """Call the other worker in both ways; return the times of each round."""
    values = {
        "nothing": None,
        "1 MiB": torch.ones(1 << 18),
        "16 MiB": torch.ones(1 << 22),
    }
    peer = worker.peer("g-1")
    latencies: dict[str, list[list[float]]] = {what: [[], [], []] for what in values}
    for _ in range(ROUNDS):
        for what, value in values.items():
            array = None if value is None else value.numpy()
            ways = (
                partial(peer.call, same, value),
                partial(other.run.remote, echo, value),
                partial(other.run.remote, echo, array),
            )
            for times, way in zip(latencies[what], ways, strict=True):
                times.append(await timed(CALLS[what], way))
    return latencies


async def measure_store() -> dict[str, list[float]]:
    """Put and get a tensor of 16 MiB; return the times of each way."""
    value = torch.ones(1 << 22)
    latencies: dict[str, list[float]] = {
        "asyncrpc.ray.put": [],
        "ray.put": [],
        "asyncrpc.ray.get": [],
        "ray.get": [],
    }

    async def by_ray() -> Any:
        return ray.put(value)

    async def by_await(ref: Any) -> Any:
        return await ref

    for _ in range(ROUNDS):
        stored, ref = await asyncrpc.ray.put(value), ray.put(value)
        ways: tuple[Callable[[], Awaitable[Any]], ...] = (
            partial(asyncrpc.ray.put, value),
            by_ray,
            partial(asyncrpc.ray.get, stored),
            partial(by_await, ref),
        )
        for times, way in zip(latencies.values(), ways, strict=True):
            times.append(await timed(1, way))
    return latencies


async def main() -> None:
    async with Gang([{"CPU": 1}] * 2, name="g") as gang:
        first, second = gang.actors
        latencies = await first.run.remote(measure, second)
    print(f"ray {ray.__version__}, torch {torch.__version__}; us a call, median (best)")
    for what, times in (await measure_store()).items():
        print(f"{what:20}{statistics.median(times):>10,.0f} ({min(times):,.0f})")
    print(f"{'':10}{'asyncrpc':>20}{'Ray, tensor':>20}{'Ray, numpy':>20}")
    for what, ways in latencies.items():
        shown = [f"{statistics.median(way):,.0f} ({min(way):,.0f})" for way in ways]
        print(f"{what:10}" + "".join(f"{text:>20}" for text in shown))


def start() -> None:
    ray.init(
        num_cpus=2,
        object_store_memory=500_000_000,
        include_dashboard=False,
        log_to_driver=False,
    )
    asyncrpc.run(main())
    ray.shutdown()


if __name__ == "__main__":
    # Ray sends functions of the main module by value, asyncrpc by name: those of this
    # module, imported, go by name in both.
    from tests.clusters.ray import beside

    beside.start()
