"""A process that is a rank of a `Group`, and of torch's default group over gloo."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import torch.distributed as dist

import asyncrpc
from asyncrpc import Group

# torch's hooks leave references in the threads of gloo; the last one must not be there,
# as the thread would wait for its own end.
KEPT: list[object] = []


@asynccontextmanager
async def both(rank: int, folder: str) -> AsyncIterator[Group]:
    """Be a rank of our group, and of torch's, which meets in `folder`."""
    async with asyncrpc.init_rpc(f"worker{rank}"):
        await asyncio.to_thread(
            dist.init_process_group,
            "gloo",
            init_method=f"file://{Path(folder) / 'gloo'}",
            rank=rank,
            world_size=int(os.environ["WORLD_SIZE"]),
        )
        async with Group(asyncrpc.current_worker(), timeout_s=60.0) as group:
            yield group
            await group.barrier()
        KEPT.append(dist.group.WORLD)
        await asyncio.to_thread(dist.destroy_process_group)
        await asyncrpc.shutdown()
