"""What runs in processes that end together: chains of calls that nobody awaits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Final

import asyncrpc
from asyncrpc import Options, Worker
from tests.integration.core import remote

WORLD_SIZE: Final = 4
STEP_S: Final = 0.02  # of each call in a chain: longer than a word of the end takes

Chain = Callable[[str, int], Any]


def note(folder: str, left: int) -> None:
    """Leave a file that says when a call of the chain ran, and where."""
    rank = asyncrpc.get_worker_info().id
    (Path(folder) / f"step{left}-{rank}").write_text(str(time.monotonic()), "utf-8")


def following() -> int:
    """Return the rank of the next worker."""
    return (asyncrpc.get_worker_info().id + 1) % WORLD_SIZE


async def in_coroutines(folder: str, left: int) -> None:
    await asyncio.sleep(STEP_S)
    note(folder, left)
    if left:
        asyncrpc.rpc_async(following(), in_coroutines, (folder, left - 1))


def in_threads(folder: str, left: int) -> None:
    time.sleep(STEP_S)
    note(folder, left)
    if left:
        asyncrpc.rpc_async(following(), in_threads, (folder, left - 1))


def with_references(folder: str, left: int) -> str:
    time.sleep(STEP_S)
    note(folder, left)
    if left:
        asyncrpc.remote(following(), with_references, (folder, left - 1))
    return "a value that nobody fetches"


async def items(folder: str, left: int) -> AsyncIterator[int]:
    yield left
    await asyncio.sleep(STEP_S)
    note(folder, left)
    if left:
        asyncrpc.rpc_async(following(), through_streams, (folder, left - 1))


async def through_streams(folder: str, left: int) -> None:
    peer = asyncrpc.current_worker().peer(following())
    async for _ in peer.stream(items, folder, left):
        pass


async def by_turns(folder: str, left: int) -> None:
    """Start the next of the chain in every way in turn."""
    await asyncio.sleep(STEP_S)
    note(folder, left)
    if left:
        ways = (asyncrpc.rpc_async, asyncrpc.remote)
        ways[left % 2](following(), by_turns, (folder, left - 1))


passed: list[int] = []  # on this process's workers


def pass_on(left: int) -> None:
    """Start the next of a chain without a pause."""
    passed.append(left)
    if left:
        asyncrpc.rpc_async(following(), pass_on, (left - 1,))


def call_on(test: str, to: str) -> None:
    """Once the test lets it, call another worker, and return without waiting."""
    remote.pass_gate(test)
    if to:
        asyncrpc.rpc_async(to, remote.add, (1,))


async def end_together(
    rank: int,
    chain: Chain,
    folder: str,
    depth: int,
    at_once: bool,  # noqa: FBT001  (`launch` passes it on)
) -> float:
    """Start a chain on the first worker, and end; return when that had happened."""
    options = Options(rendezvous_timeout_s=15.0)
    worker = await Worker(f"w{rank}", options=options).__aenter__()
    if not at_once:
        await worker.barrier(15.0)
    if rank == 0:
        if chain is in_threads or chain is with_references:
            asyncrpc.remote(1, chain, (folder, depth - 1))
        else:
            asyncrpc.rpc_async(1, chain, (folder, depth - 1))
    await asyncrpc.shutdown(graceful=True, timeout_s=15.0)
    assert worker.is_closed
    return time.monotonic()
