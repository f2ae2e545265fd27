"""What workers of the tests run."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import ray
import torch

import asyncrpc
import asyncrpc.ray
from asyncrpc.ray import StoredValue


def last_words() -> None:
    os._exit(7)


async def forever() -> None:
    await asyncio.Event().wait()


async def pid_of(name: str) -> int:
    return await asyncrpc.current_worker().peer(name).call(os.getpid)


def join_ray() -> str:
    """Become a driver of the cluster that this worker is in; return the node's id."""
    ray.init(log_to_driver=False)  # its address is in the environment
    node_id: str = ray.get_runtime_context().get_node_id()
    return node_id


async def stored_ones() -> StoredValue:
    return await asyncrpc.ray.put(torch.ones(1 << 20))


async def memory_of(stored: StoredValue) -> tuple[float, str]:
    """Return the sum of a stored tensor, and which memory it is in."""
    tensor = await asyncrpc.ray.get(stored)
    return tensor.sum().item(), mapping_at(tensor.data_ptr())


def mapping_at(address: int) -> str:
    """Return file and place of the memory at an address; empty: it is private."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        ends, _, offset, device, inode, *name = line.split()
        first, last = (int(end, 16) for end in ends.split("-"))
        if first <= address < last and name and "plasma" in name[0]:
            return f"{device} {inode} {int(offset, 16) + address - first}"
    return ""
