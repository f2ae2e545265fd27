"""One of two processes with a worker each: rank 0 leads, the other one answers."""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable

import torch

import asyncrpc
from tests.bench import workloads as w


def run(
    options: argparse.Namespace,
    lead: Callable[[asyncrpc.Peer, argparse.Namespace], Awaitable[None]],
    *,
    of_worker: asyncrpc.Options | None = None,
    prepare: Callable[[asyncrpc.Worker], object] = bool,
) -> None:
    """Run this process; its options have `rank` and `port`."""

    async def live() -> None:
        torch.set_num_threads(1)
        async with asyncrpc.init_rpc(
            (w.CALLER, w.CALLEE)[options.rank],
            rank=options.rank,
            world_size=2,
            rendezvous=f"tcp://127.0.0.1:{options.port}",
            options=of_worker,
        ) as worker:
            prepare(worker)
            if options.rank == 0:
                await lead(worker.peer(w.CALLEE), options)
            await worker.barrier()

    asyncrpc.run(live())
