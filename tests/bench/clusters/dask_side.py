"""The program for dask.distributed, by its asynchronous client."""

from __future__ import annotations

import asyncio
import sys
import time

from distributed import Client, LocalCluster

from tests.bench.clusters.rounds import (
    OUTSTANDING,
    Counter,
    awaited_per_second,
    computed,
    tell,
)


def cluster_of(count: int) -> LocalCluster:
    return LocalCluster(
        n_workers=count,
        threads_per_worker=1,
        processes=True,
        dashboard_address=None,
        asynchronous=True,
        silence_logs=40,
    )


async def started_s(count: int) -> float:
    begun_s = time.perf_counter()
    async with (
        cluster_of(count) as cluster,
        Client(cluster, asynchronous=True) as client,
    ):
        await client.wait_for_workers(count)
        await client.run(computed)
        return time.perf_counter() - begun_s


async def main(seconds: float) -> None:
    figures = {f"start_{count}": await started_s(count) for count in (1, 8, 32)}
    async with cluster_of(8) as cluster, Client(cluster, asynchronous=True) as client:
        await client.wait_for_workers(8)
        addresses = list(cluster.scheduler.workers)
        counters = [
            await client.submit(Counter, workers=[address], actor=True, pure=False)
            for address in addresses
        ]
        counter, step = counters[0], 3
        figures["one"] = await awaited_per_second(lambda: counter.add(1), seconds)

        async def many() -> None:
            await asyncio.gather(*(counter.add(1) for _ in range(OUTSTANDING)))

        figures["many"] = await awaited_per_second(many, seconds, OUTSTANDING)

        async def fan(times: int) -> None:
            await asyncio.gather(*(actor.add(1) for actor in counters * times))

        figures["fan_8"] = await awaited_per_second(lambda: fan(1), seconds)
        figures["fan_64"] = await awaited_per_second(lambda: fan(8), seconds)
        figures["closure"] = await awaited_per_second(
            lambda: client.submit(lambda value: value + step, 1, pure=False), seconds
        )
    tell(figures)


if __name__ == "__main__":
    asyncio.run(main(float(sys.argv[1])))
