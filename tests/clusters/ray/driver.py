"""A driver that waits for its end.

    $ python -m tests.clusters.ray.driver ADDRESS gang|cluster

It prints the processes of its workers when they run.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

import ray

import asyncrpc
from asyncrpc.ray import Gang


async def gang() -> None:
    async with Gang([{"CPU": 1}] * 2, name="g") as gang:
        await tell_and_wait([worker.pid for worker in gang.workers])


async def cluster() -> None:
    async with asyncrpc.Cluster.ray([{"CPU": 1}] * 2, start_timeout_s=300.0) as cluster:
        await tell_and_wait([await peer.call(os.getpid) for peer in cluster.peers])


async def tell_and_wait(pids: list[int]) -> None:
    sys.stdout.write(f"{json.dumps(pids)}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    ray.init(address=sys.argv[1], log_to_driver=False)
    asyncrpc.run(gang() if sys.argv[2] == "gang" else cluster())
