"""What workers of the tests run."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Final

import torch

import asyncrpc
import asyncrpc.ray
from asyncrpc.ray import StoredValue


def pid() -> int:
    return os.getpid()


def ones() -> torch.Tensor:
    return torch.ones(3)


def last_words() -> None:
    os._exit(7)


async def leave() -> None:
    """Shut this worker down, as its program may, when this call has ended."""
    worker = asyncrpc.current_worker()
    worker.parts.start_task(worker.shutdown())


async def forever() -> None:
    await asyncio.Event().wait()


async def members_after_barrier() -> list[str]:
    worker = asyncrpc.current_worker()
    await worker.barrier()
    return sorted(known_member.name for known_member in worker.known_members)


async def pid_of(name: str) -> int:
    return await asyncrpc.current_worker().peer(name).call(pid)


async def stored_ones() -> StoredValue:
    return await asyncrpc.ray.put(torch.ones(1 << 20))


async def sum_of(stored: StoredValue) -> float:
    return float((await asyncrpc.ray.get(stored)).sum())


_told: Final = threading.Event()


def until_told() -> None:
    _told.wait()


async def tell(_: asyncrpc.Worker) -> None:
    _told.set()
