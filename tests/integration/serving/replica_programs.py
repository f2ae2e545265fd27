"""Replicas in processes of their own, and the functions that they run."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from typing import Final

import asyncrpc
from asyncrpc import NetworkOptions, Options, serving

SECRET: Final = "a secret of these tests"


class Held:
    """The calls that wait here, and what lets them go."""

    condition: asyncio.Condition
    count = 0
    is_open = False


def options_at(where: str) -> Options:
    network = NetworkOptions(listen=(where,))
    return Options(secret=SECRET, network=network, drain_timeout_s=30.0)


async def serve(name: str, folder: str, member: str = "web") -> None:
    """Be a replica until SIGTERM."""
    Held.condition = asyncio.Condition()
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    worker = asyncrpc.Worker(
        name,
        rendezvous=f"join://{folder}/{member}",
        options=options_at(f"uds://{folder}/{name}"),
    )
    async with worker, serving.Replica(worker):
        await ended.wait()


def program(name: str, folder: str) -> str:
    """Return the source of a replica's main module."""
    return f"""
import asyncio
from tests.integration.serving import replica_programs
asyncio.run(replica_programs.serve({name!r}, {folder!r}))
print("ended in order", flush=True)
"""


# --- what they run -------------------------------------------------------------------


async def work(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return asyncrpc.current_worker().name


async def hold() -> str:
    """Wait until all who wait here are let go."""
    async with Held.condition:
        Held.count += 1
        Held.condition.notify_all()
        await Held.condition.wait_for(lambda: Held.is_open)
    return asyncrpc.current_worker().name


async def wait_held(count: int) -> None:
    async with Held.condition:
        await Held.condition.wait_for(lambda: Held.count >= count)


async def let_go() -> None:
    async with Held.condition:
        Held.is_open = True
        Held.condition.notify_all()


async def count_up(items: int) -> AsyncIterator[int]:
    for number in range(items):
        await asyncio.sleep(0.001)
        yield number
