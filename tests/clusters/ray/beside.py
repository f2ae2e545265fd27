"""Calls between two workers in Ray's bundles, and between two actors of Ray there.

    $ python -m tests.clusters.ray.beside

Both ways in one run, in turn: each way has its share of whatever else the host does.
The callee does nothing with what it gets; a tensor goes there and comes back.  Then a
tensor in Ray's object store, both ways.  For the tables of docs/how-to/run-on-ray.md.
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

ROUNDS = 15
CALLS = {"nothing": 200, "1 MiB": 40, "16 MiB": 10}


def value_of(what: str) -> torch.Tensor | None:
    sizes = {"1 MiB": 1 << 18, "16 MiB": 1 << 22}
    return torch.ones(sizes[what]) if what in sizes else None


def same(value: Any) -> Any:
    return value


async def timed(calls: int, call: Callable[[], Awaitable[Any]]) -> float:
    """Return the microseconds of one call."""
    await call()
    begun = time.perf_counter()
    for _ in range(calls):
        await call()
    return (time.perf_counter() - begun) / calls * 1e6


async def by_asyncrpc(what: str) -> float:
    """Return the microseconds of a call to the other worker."""
    peer = asyncrpc.current_worker().peer("w1")
    return await timed(CALLS[what], partial(peer.call, same, value_of(what)))


class Actor:
    """What Ray calls."""

    async def echo(self, value: Any) -> Any:
        return value

    async def measure(self, other: Any, what: str) -> list[float]:
        """Return the microseconds of a call with a tensor, and with an array."""
        value = value_of(what)
        array = None if value is None else value.numpy()
        return [
            await timed(CALLS[what], partial(other.echo.remote, sent))
            for sent in (value, array)
        ]


async def measure_calls() -> dict[str, list[list[float]]]:
    """Return the times of each round: asyncrpc, a tensor by Ray, an array by Ray."""
    latencies: dict[str, list[list[float]]] = {what: [] for what in CALLS}
    make: Any = ray.remote(num_cpus=1)(Actor)
    first, second = make.remote(), make.remote()
    async with asyncrpc.Cluster.ray([{"CPU": 1}] * 2) as cluster:
        for _ in range(ROUNDS):
            for what, rounds in latencies.items():
                own = await cluster["w0"].call(by_asyncrpc, what)
                rounds.append([own, *await first.measure.remote(second, what)])
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
    latencies = await measure_calls()
    print(f"ray {ray.__version__}, torch {torch.__version__}; us a call, median (best)")
    for what, times in (await measure_store()).items():
        print(f"{what:20}{statistics.median(times):>10,.0f} ({min(times):,.0f})")
    print(f"{'':10}{'asyncrpc':>20}{'Ray, tensor':>20}{'Ray, numpy':>20}")
    for what, rounds in latencies.items():
        ways = list(zip(*rounds, strict=True))
        shown = [f"{statistics.median(way):,.0f} ({min(way):,.0f})" for way in ways]
        print(f"{what:10}" + "".join(f"{text:>20}" for text in shown))


def start() -> None:
    ray.init(
        num_cpus=4,
        object_store_memory=500_000_000,
        include_dashboard=False,
        log_to_driver=False,
    )
    asyncrpc.run(main())
    ray.shutdown()


if __name__ == "__main__":
    # asyncrpc sends functions of the main module by value, of others by name.
    from tests.clusters.ray import beside

    beside.start()
