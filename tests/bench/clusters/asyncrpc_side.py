"""The program for asyncrpc."""

from __future__ import annotations

import asyncio
import sys
import time

import asyncrpc
from tests.bench.clusters.rounds import (
    OUTSTANDING,
    Counter,
    awaited_per_second,
    computed,
    tell,
)


async def started_s(count: int) -> float:
    begun_s = time.perf_counter()
    async with asyncrpc.Cluster(count) as cluster:
        await asyncio.gather(*(peer.call(computed) for peer in cluster.peers))
        return time.perf_counter() - begun_s


async def main(seconds: float) -> None:
    figures = {f"start_{count}": await started_s(count) for count in (1, 8, 32)}
    async with asyncrpc.Cluster(8) as cluster:
        counters = await cluster.spawn(Counter)
        counter, step = counters[0], 3
        figures["one"] = await awaited_per_second(lambda: counter.add(1), seconds)
        figures["many"] = await awaited_per_second(
            lambda: asyncio.gather(*(counter.add(1) for _ in range(OUTSTANDING))),
            seconds,
            OUTSTANDING,
        )
        figures["fan_8"] = await awaited_per_second(lambda: counters.add(1), seconds)
        all_64 = await cluster.spawn(Counter, per_worker=8)
        figures["fan_64"] = await awaited_per_second(lambda: all_64.add(1), seconds)
        peer, local = cluster["w0"], lambda value: value + step
        figures["closure"] = await awaited_per_second(
            lambda: peer.call(local, 1), seconds
        )
    tell(figures)


if __name__ == "__main__":
    asyncrpc.run(main(float(sys.argv[1])))
