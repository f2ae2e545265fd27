"""A driver that waits for its end.

    $ python -m tests.clusters.ray.driver ADDRESS

It prints the processes of its workers when they run.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

import ray

import asyncrpc


async def main() -> None:
    async with asyncrpc.Cluster.ray([{"CPU": 1}] * 2, start_timeout_s=300.0) as cluster:
        pids = [await peer.call(os.getpid) for peer in cluster.peers]
        sys.stdout.write(f"{json.dumps(pids)}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    ray.init(address=sys.argv[1], log_to_driver=False)
    asyncrpc.run(main())
