"""What does a new generation of an elastic group cost, and how soon is there one?

    $ python -m tests.bench.bench_elastic

Reconfigure: all members call it at the same time, nothing having happened; the time
until the last one has the next generation.
Killed: one of three members is killed by SIGKILL while all reduce a tensor, step after
step; the time until the others have ended the first step without it.  Of 4 MiB, through
shared memory.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import time
from typing import Any, Final

import torch

import asyncrpc
from asyncrpc import ElasticGroup, Options, join_group
from asyncrpc.errors import CollectiveError
from asyncrpc.testing import ProcessCluster, acting_as

SIZES: Final = (2, 4, 8)
TIMES: Final = 20
KILLS: Final = 5
ELEMENTS: Final = 1 << 20
LIMIT_S: Final = 60.0
OPTIONS: Final = Options(rendezvous_timeout_s=240.0)

kept: dict[str, ElasticGroup] = {}  # of a process, between two calls


async def enter(min_size: int) -> None:
    worker = asyncrpc.current_worker()
    kept["group"] = await join_group(worker, "measured", min_size=min_size)


async def reconfigure() -> None:
    await kept["group"].reconfigure(timeout_s=LIMIT_S)


async def step_on(count: int) -> float:
    """Reduce again and again; return when there was a step of a smaller group."""
    group, tensor = kept["group"], torch.ones(ELEMENTS)
    size = group.current.size
    for _ in range(count):
        try:
            await group.current.all_reduce(tensor, "avg")
        except CollectiveError:
            await group.reconfigure(quorum="any", timeout_s=LIMIT_S)
            await group.current.all_reduce(tensor, "avg")
            assert group.current.size < size
            return time.monotonic()
    raise AssertionError("nobody was killed")


async def on_all(worker: asyncrpc.Worker, names: str, call: Any, *args: Any) -> Any:
    with acting_as(worker):
        others = (worker.peer(name).call(call, *args) for name in names)
        return await asyncio.gather(call(*args), *others)


async def cost_of(size: int) -> list[float]:
    names = "bcdefgh"[: size - 1]
    cluster = ProcessCluster(list(names), options=OPTIONS, method="forkserver")
    async with cluster as worker:
        await on_all(worker, names, enter, size)
        took_ms = []
        for _ in range(TIMES):
            begun_s = time.perf_counter()
            await on_all(worker, names, reconfigure)
            took_ms.append((time.perf_counter() - begun_s) * 1e3)
    return took_ms


async def recovery() -> float:
    cluster = ProcessCluster(["b", "c"], options=OPTIONS, method="forkserver")
    async with cluster as worker:
        await on_all(worker, "bc", enter, 3)
        cluster.expect_death("c")
        with acting_as(worker):
            c = worker.peer("c").call(step_on, 1 << 20)
            going = asyncio.gather(
                step_on(1 << 20), worker.peer("b").call(step_on, 1 << 20)
            )
            await asyncio.sleep(1.0)
            killed_s = time.monotonic()
            cluster.kill("c")
            ended_s = max(await going)
            await asyncio.gather(c, return_exceptions=True)
        return (ended_s - killed_s) * 1e3


def shown(name: str, took_ms: list[float]) -> None:
    low, high = min(took_ms), max(took_ms)
    middle = statistics.median(took_ms)
    print(f"| {name} | {middle:.1f} | {low:.1f} to {high:.1f} |", flush=True)


def main() -> None:
    multiprocessing.set_forkserver_preload(["asyncrpc.testing"])
    print("| | median, ms | range |\n| --- | ---: | ---: |")
    for size in SIZES:
        took_ms = asyncrpc.run(cost_of(size))
        shown(f"reconfigure, {size} workers", took_ms[1:])
    took_ms = [asyncrpc.run(recovery()) for _ in range(KILLS)]
    shown("from kill -9 to the first step without it", took_ms)


if __name__ == "__main__":
    main()
