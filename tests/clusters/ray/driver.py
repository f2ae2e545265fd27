"""A driver that waits for its end.

    $ python -m tests.clusters.ray.driver ADDRESS

It prints the processes of its gang when they run.
"""

from __future__ import annotations

import asyncio
import json
import sys

import ray

import asyncrpc
from asyncrpc.ray import Gang


async def main() -> None:
    async with Gang([{"CPU": 1}] * 2, name="g") as gang:
        pids = [worker.pid for worker in gang.workers]
        sys.stdout.write(f"{json.dumps(pids)}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    ray.init(address=sys.argv[1], log_to_driver=False)
    asyncrpc.run(main())
