"""What has ended is freed at once: nothing waits for Python's collector of cycles.

A full collection in a process that has imported torch takes 0.1 s, and comes the more
often the more it is given to do.
"""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import torch
from torch import nn

import asyncrpc
from asyncrpc.testing import Cluster, acting_as
from tests.integration.core import remote

TIMES = 40

Work = Callable[[asyncrpc.Peer], Awaitable[Any]]


@pytest.fixture(params=["mem", "uds"])
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[list[asyncrpc.Worker]]:
    async with Cluster(2, network=request.param) as workers:
        yield workers


async def garbage_of(work: Work, peer: asyncrpc.Peer) -> dict[str, int]:
    """Return what only the collector frees of some work, done many times; by class."""
    for _ in range(TIMES):  # what is made once is made here
        await work(peer)
    gc.collect()
    gc.disable()
    try:
        for _ in range(TIMES):
            await work(peer)
        for _ in range(4):  # what nobody waits for has come, too
            await peer.call(remote.add_async, 1)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        return dict(Counter(type(leaked).__qualname__ for leaked in gc.garbage))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


async def _raises(peer: asyncrpc.Peer) -> None:
    with contextlib.suppress(ValueError):
        await peer.call(remote.fail)


async def _too_late(peer: asyncrpc.Peer) -> None:
    with contextlib.suppress(asyncrpc.DeadlineExceededError):
        await peer.using(timeout_s=0.001).call(remote.sleep_long)


async def _reads_all(peer: asyncrpc.Peer) -> None:
    async for _ in peer.stream(remote.count_to, 3):
        pass


async def _reads_all_of_a_thread(peer: asyncrpc.Peer) -> None:
    async for _ in peer.stream(remote.count_sync, 3):
        pass


async def _leaves(peer: asyncrpc.Peer) -> None:
    stream: Any = peer.stream(remote.count_to, 100)
    async with contextlib.aclosing(stream) as items:
        async for _ in items:
            break


async def _refers(peer: asyncrpc.Peer) -> None:
    await peer.remote(remote.add_async, torch.ones(3)).to_here()


WORK: dict[str, Work] = {
    "a coroutine": lambda peer: peer.call(remote.add_async, 1),
    "a coroutine that waits": lambda peer: peer.call(
        remote.forward, ["a"], remote.add_async, 1
    ),
    "a thread": lambda peer: peer.call(remote.add, 1),
    "on the loop": lambda peer: peer.call(remote.add_on_loop, 1),
    "a tensor": lambda peer: peer.call(remote.echo_async, torch.ones(1000)),
    "an error": _raises,
    "a deadline": _too_late,
    "a stream": _reads_all,
    "a stream of a thread": _reads_all_of_a_thread,
    "a stream that is left": _leaves,
    "a reference": _refers,
}


@pytest.mark.parametrize("name", WORK)
async def test_ended_call_is_freed(pair: list[asyncrpc.Worker], name: str) -> None:
    garbage = await garbage_of(WORK[name], pair[0].peer("b"))
    assert not {kind: n for kind, n in garbage.items() if n >= TIMES}


async def test_ended_training_step_is_freed(pair: list[asyncrpc.Worker]) -> None:
    with acting_as(pair[0]):
        layer: Any = asyncrpc.nn.RemoteModule("b", nn.Linear, (4, 4))
        optimizer = asyncrpc.optim.DistributedOptimizer(
            torch.optim.SGD, await layer.remote_parameters(), lr=0.1
        )

        async def step(_: asyncrpc.Peer) -> None:
            async with asyncrpc.autograd.context() as context:
                loss = (await layer.forward_async(torch.ones(2, 4))).sum()
                await asyncrpc.autograd.backward(context, [loss])
                await optimizer.step(context)

        garbage = await garbage_of(step, pair[0].peer("b"))
    assert not {kind: n for kind, n in garbage.items() if n >= TIMES}
