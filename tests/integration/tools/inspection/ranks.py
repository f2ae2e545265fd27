"""What the ranks of a group do in `test_torch_dump` and `test_debug_handler`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import torch

import asyncrpc
from asyncrpc import Group


async def take_part(members: Sequence[str], operations: Sequence[str]) -> None:
    """Take part in collectives, one after the other."""
    group = Group(asyncrpc.current_worker(), members, name="ranks", timeout_s=None)
    for operation in operations:
        if operation == "all_reduce":
            await group.all_reduce(torch.ones(4))
        elif operation == "all_gather":
            await group.all_gather(torch.ones(2))
        elif operation == "barrier":
            await group.barrier()
        elif operation == "sleep":
            await asyncio.Event().wait()
        elif operation == "block":
            time.sleep(3600.0)  # noqa: ASYNC251  (it holds up the loop)
