"""Several workers of one loop: each task is told once, by its worker."""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest_asyncio

import asyncrpc
from asyncrpc import LocalRendezvous, NetworkOptions, Worker
from asyncrpc.tools.inspection.machine.graph import find_hangs
from asyncrpc.tools.inspection.machine.wording import sentence
from tests.integration.tools.inspection.hanging import once
from tests.integration.tools.inspection.looks import AFTER_S, OPTIONS, until_said


@pytest_asyncio.fixture
async def neighbours() -> AsyncIterator[list[Worker]]:
    meeting = LocalRendezvous(4)
    with tempfile.TemporaryDirectory(prefix="asyncrpc-") as folder:
        workers = [
            Worker(
                name,
                rank=rank,
                rendezvous=meeting,
                options=dataclasses.replace(
                    OPTIONS, network=NetworkOptions(listen=(f"uds://{folder}/{name}",))
                ),
            )
            for rank, name in enumerate("abcd")
        ]
        async with AsyncExitStack() as stack:
            entering = map(stack.enter_async_context, workers)
            yield await asyncio.gather(*entering)


def table() -> asyncio.Lock:
    lock: asyncio.Lock = once("table of neighbours", asyncio.Lock)
    return lock


async def evict() -> None:
    async with table():
        await asyncrpc.current_worker().peer("c").call(rows)


async def rows() -> None:
    await asyncrpc.current_worker().peer("b").call(apply)


async def apply() -> None:
    async with table():
        pass


async def test_cycle_of_neighbours_is_one_hang_with_each_task_once(
    neighbours: list[Worker],
) -> None:
    call = asyncio.create_task(neighbours[0].peer("b").call(evict), name="asks")
    cycle = (
        r"task `asks` waits .* for b `evict`, which waits for c `rows`, which waits for"
        r" b `apply`, which waits for a Lock held by b task `evict`: a cycle"
    )
    view = await until_said(neighbours[0], cycle)
    said = [
        sentence(view.graph, hang) for hang in find_hangs(view.graph, after_s=AFTER_S)
    ]
    assert len(said) == 1, said
    counts = Counter(
        actor.name
        for snapshot in view.snapshots.values()
        for actor in snapshot.actors
        if not actor.is_internal
    )
    assert {"asks", "MainThread"} <= counts.keys()
    assert set(counts.values()) == {1}, counts
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
