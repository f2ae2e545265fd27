"""A caller that keeps some calls outstanding for a while, and counts the answers.

Rank 0 starts one in each process at the same time, by a call; so these functions are in
a module that all processes import under one name.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from functools import partial

import asyncrpc
from asyncrpc.testing import acting_as
from tests.bench import workloads as w

LEAD_IN_S = 0.1  # until all callers are at work; these answers do not count

workers: list[asyncrpc.Worker] = []  # of this process, for `asyncrpc_window`


async def asyncrpc_window(count: int, seconds: float) -> float:
    """Let `count` workers of this process call; return their answers per second."""
    counts = await asyncio.gather(
        *(_one(worker, seconds) for worker in workers[:count])
    )
    return sum(counts) / seconds


async def _one(worker: asyncrpc.Worker, seconds: float) -> int:
    with acting_as(worker):
        return await _count(seconds)


async def _count(seconds: float) -> int:
    start = partial(asyncrpc.rpc_async, w.CALLEE, w.nothing_async)
    await start()
    calls = deque(start() for _ in range(w.OUTSTANDING_EACH))
    begin_s = time.perf_counter() + LEAD_IN_S
    count, now_s = 0, 0.0
    while now_s < begin_s + seconds:
        await calls.popleft()
        calls.append(start())
        now_s = time.perf_counter()
        count += now_s >= begin_s
    for call in calls:
        await call
    return count
