"""Items of a generator there arrive here, in order, no faster than they are taken."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest
import torch

import asyncrpc
from asyncrpc import LimitOptions, Options, Worker
from asyncrpc.errors import CallKindError
from asyncrpc.testing import Cluster
from tests.integration.core import remote
from tests.integration.core.conftest import Trio
from tests.integration.core.remote import Watch

GENERATORS = [remote.count_to, remote.count_sync]


def stream(trio: Trio, function: Any, *args: Any) -> AsyncGenerator[Any, None]:
    items: Any = trio[0].peer("b").stream(function, *args)
    return items  # type: ignore[no-any-return]


@pytest.mark.parametrize("function", GENERATORS)
async def test_items_come_in_order(wired: Trio, function: Any) -> None:
    assert [item async for item in stream(wired, function, 100)] == list(range(100))
    assert [item async for item in stream(wired, function, 0)] == []


async def test_large_and_small_items_keep_their_order(wired: Trio) -> None:
    items = [item async for item in stream(wired, remote.tensors, 12, 200_000)]
    assert [float(item[0]) for item in items] == list(range(12))
    assert [len(item) for item in items[:2]] == [4, 200_000]


@pytest.mark.parametrize("function", GENERATORS)
async def test_producer_runs_within_its_credit(watch: Watch, function: Any) -> None:
    limit = 4
    options = Options(limits=LimitOptions(stream_items_max=limit))
    async with Cluster(2, options=options) as (a, _):
        producer: Any = a.peer("b").stream(function, 100, "w")
        async with aclosing(producer) as items:
            taken = 0
            async for _ in items:
                taken += 1
                for _ in range(5):  # give the producer every chance
                    await a.peer("b").call(remote.add, 1)
                # One more is made and waits for room; a grant covers what was taken.
                assert len(watch.notes) <= taken + limit + 1
                if taken == 30:
                    break
        await asyncio.wait_for(watch.ended.wait(), 30)


@pytest.mark.parametrize("function", GENERATORS)
async def test_closing_early_runs_the_generators_finally(
    wired: Trio, watch: Watch, function: Any
) -> None:
    async with aclosing(stream(wired, function, 10_000, "w")) as items:
        async for item in items:
            if item == 3:
                break
    await asyncio.wait_for(watch.ended.wait(), 30)
    assert len(watch.notes) < 100


async def test_close_during_a_step_in_a_thread_ends_the_generator_after_it(
    trio: Trio, watch: Watch
) -> None:
    items = stream(trio, remote.gated, "w")
    assert await anext(items) == 0
    waiting = asyncio.ensure_future(anext(items))
    await watch.begun.wait()  # the second step is in its thread now
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await trio[0].peer("b").call(remote.add_async, 1)
    watch.gate.set()
    await asyncio.wait_for(watch.ended.wait(), 30)
    assert watch.notes == ["finally"]


async def test_an_error_comes_after_the_items_before_it(wired: Trio) -> None:
    items = stream(wired, remote.fail_after, 5)
    assert [await anext(items) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="after 5"):
        await anext(items)


async def test_cancelled_consumer_ends_the_producer(trio: Trio, watch: Watch) -> None:
    async def consume() -> None:
        async for _ in stream(trio, remote.count_and_wait, "w"):
            pass

    task = asyncio.create_task(consume())
    await watch.begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(watch.ended.wait(), 30)


async def test_deadline_ends_producer_and_consumer(trio: Trio, watch: Watch) -> None:
    async def consume() -> None:
        async with asyncrpc.deadline(1):
            async for _ in stream(trio, remote.count_and_wait, "w"):
                pass

    with pytest.raises(asyncrpc.DeadlineExceededError):
        await consume()
    await asyncio.wait_for(watch.ended.wait(), 30)


async def test_lost_producer_raises_an_error(trio: Trio) -> None:
    a, _, _ = trio
    items = stream(trio, remote.count_to, 1000)
    assert await anext(items) == 0
    link = a.parts.directory.find("b").link
    assert link is not None
    link.connection.fail(asyncrpc.errors.ConnectionLostError("cut by the test"))
    with pytest.raises(asyncrpc.WorkerLostError, match="cut by the test"):
        async for _ in items:
            pass


async def test_stream_needs_a_generator_and_call_a_function(trio: Trio) -> None:
    with pytest.raises(CallKindError, match=r"use `call`.*make it a generator"):
        await anext(stream(trio, remote.add, 1))
    with pytest.raises(CallKindError, match="use `stream`"):
        await trio[0].peer("b").call(remote.count_to, 1)


async def test_streams_of_a_connection_do_not_block_each_other(trio: Trio) -> None:
    slow = stream(trio, remote.count_to, 1000)
    assert await anext(slow) == 0  # and is not taken from for a while
    assert len([item async for item in stream(trio, remote.count_to, 500)]) == 500
    assert [item async for item in slow] == list(range(1, 1000))


async def test_stream_from_the_own_worker_carries_tensors(a: Worker) -> None:
    rows = torch.arange(6.0).reshape(3, 2)
    items: Any = a.peer("a").stream(remote.rows_of, rows)
    assert torch.equal(torch.stack([row async for row in items]), rows)
