"""A peer uses services whose code the process of their worker has not loaded yet."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import torch

from asyncrpc import Worker
from asyncrpc.core.peers.peer import Peer
from asyncrpc.inspection import why
from asyncrpc.optim import DistributedOptimizer

GENEROUS_S = 120.0
PROGRAM = """
import asyncio, sys, asyncrpc

async def main():
    worker = asyncrpc.Worker("ps", rank=1, world_size=2, rendezvous=sys.argv[1])
    async with worker:
        await worker.shutdown(graceful=True)

asyncio.run(main())
"""
INSPECTION = (
    "asyncrpc.tools.inspection.service"  # a look at its host loads the others, too
)


async def has_inspection(peer: Peer) -> bool:
    """Return whether the process of a peer has loaded what answers a look."""
    program = f"{INSPECTION!r} in __import__('sys').modules"
    is_loaded: bool = await peer.call(eval, program, {})  # noqa: S307  (text of ours)
    return is_loaded


async def test_process_with_the_core_alone_answers(tmp_path: Path) -> None:
    where = f"file://{tmp_path}/store"
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PROGRAM, where), cwd=Path(__file__).parents[3]
    )
    async with asyncio.timeout(GENEROUS_S):
        async with Worker("t", rank=0, world_size=2, rendezvous=where) as worker:
            peer = worker.peer("ps")
            assert not await has_inspection(peer)
            parameter = peer.remote(torch.nn.Parameter, torch.ones(2))
            await DistributedOptimizer(torch.optim.SGD, [parameter], lr=0.1)
            assert await why() == []
            assert await has_inspection(peer)
            await worker.shutdown(graceful=True)
        assert await program.wait() == 0
