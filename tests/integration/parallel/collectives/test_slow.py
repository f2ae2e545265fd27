"""A rank that stands still is named by the others, and goes on with them afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import Any

import pytest
import torch

import asyncrpc
from asyncrpc import Group, LimitOptions, LivenessOptions, Options
from asyncrpc.errors import CollectiveTimeoutError
from asyncrpc.testing import ProcessCluster, acting_as

kept: dict[str, Any] = {}  # of a process, between two calls


async def meet() -> None:
    group = kept["group"] = Group(asyncrpc.current_worker(), timeout_s=1.0)
    # The first ones take longer: connections, processes that import what they need.
    group.timeout_s = 60.0
    await group.all_reduce(torch.ones(3))
    group.timeout_s = 1.0


async def begin(numel: int) -> int:
    """Begin, and leave it at that; return how many have begun."""
    group = kept["group"]
    kept["begun"] = asyncio.ensure_future(group.all_reduce(torch.ones(numel)))
    await asyncio.sleep(0)
    return int(group._matching.machine.operations.begun)  # noqa: SLF001


async def fail(numel: int) -> tuple[str, tuple[str, ...]]:
    """Take part in one that fails; say how, and who is named."""
    with pytest.raises(CollectiveTimeoutError, match="more than 1 s") as caught:
        await kept["group"].all_reduce(torch.ones(numel))
    return str(caught.value), caught.value.ranks


async def end(numel: int) -> None:
    """Take part in one that the others give up; it fails, or has ended before.

    Who stood still may find all that it needs when it goes on, before it hears of that.
    """
    group = kept["group"]
    begun = kept.pop("begun", None)
    with contextlib.suppress(CollectiveTimeoutError):
        await (begun or group.all_reduce(torch.ones(numel)))


async def work(numel: int) -> bool:
    group = kept["group"]
    group.timeout_s = 60.0
    result = await group.all_reduce(torch.ones(numel))
    return bool((result == group.size).all())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("numel", "has_begun"), [(10, False), (3_000_000, False), (3_000_000, True)]
)
@pytest.mark.parametrize("memory_bytes", [0, LimitOptions().shared_memory_bytes])
async def test_stopped_rank_is_named_and_continues(
    numel: int,
    memory_bytes: int,
    has_begun: bool,  # noqa: FBT001
) -> None:
    options = Options(
        limits=LimitOptions(shared_memory_bytes=memory_bytes),
        liveness=LivenessOptions(lost_after_s=60.0),
    )
    cluster = ProcessCluster(["b", "c"], options=options, method="forkserver")
    async with cluster as worker:
        with acting_as(worker):
            b, c = worker.peer("b"), worker.peer("c")
            await asyncio.gather(meet(), b.call(meet), c.call(meet))
            if has_begun:
                await c.call(begin, numel)
            os.kill(cluster.pid("c"), signal.SIGSTOP)
            c_ends = c.call(end, numel)
            failures = await asyncio.gather(fail(numel), b.call(fail, numel))
            for text, ranks in failures:
                assert "rank 2 ('c')" in text
                assert ranks == ("c",)
            os.kill(cluster.pid("c"), signal.SIGCONT)
            await c_ends
            works = asyncio.gather(
                work(numel), b.call(work, numel), c.call(work, numel)
            )
            assert all(await works)
    kept.clear()
