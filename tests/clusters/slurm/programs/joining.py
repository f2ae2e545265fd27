"""A worker that outlives the others, and workers of a job that is started again.

`serve ADDRESS` is the first: it prints every change of the membership.  `join ADDRESS`
are the others: each has the name of its task, and stays until it is told to end.
"""

from __future__ import annotations

import asyncio
import os
import sys

import asyncrpc


async def serve(where: str) -> None:
    """Print who comes and goes."""
    options = asyncrpc.Options(network=asyncrpc.NetworkOptions(listen=(where,)))
    async with asyncrpc.Worker(
        "server", rank=0, rendezvous={"server": where}, options=options
    ) as worker:
        changes = worker.members_changed()
        print("server listens", flush=True)
        incarnations = set()
        async for change in changes:
            incarnations.add(change.incarnation)
            life = len(incarnations)
            print(f"{change.member.name} {change.kind} in life {life}", flush=True)


async def join(where: str) -> None:
    """Be a worker of the other's group until told to end."""
    name = f"trainer{os.environ['SLURM_PROCID']}"
    async with (
        asyncrpc.Worker(name, rendezvous=f"join://{where}") as worker,
        asyncrpc.Preemption(worker),
    ):
        restarts = os.environ.get("SLURM_RESTART_COUNT", "0")
        print(f"{name} has joined after {restarts} restarts", flush=True)
        await asyncio.Event().wait()  # until it is preempted


asyncrpc.run({"serve": serve, "join": join}[sys.argv[1]](sys.argv[2]))
