"""A deadline counts everywhere: here, on the callee, and in what that calls."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

import asyncrpc
from asyncrpc import DeadlineExceededError, Options, Outcome, Worker
from asyncrpc.testing import Cluster, acting_as
from tests.integration.core import remote
from tests.integration.core.conftest import Trio
from tests.integration.core.remote import Watch


async def test_expired_call_raises_a_timeout_with_its_limit(
    wired: Trio, watch: Watch
) -> None:
    a, _, _ = wired
    await a.peer("b").call(remote.add, 1)
    with pytest.raises(TimeoutError, match=r"wait_for_ever on 'b'.*0\.5 s") as caught:
        async with asyncrpc.deadline(0.5):
            await a.peer("b").call(remote.wait_for_ever, "w")
    assert isinstance(caught.value, DeadlineExceededError)
    assert caught.value.outcome is Outcome.UNKNOWN
    assert caught.value.timeout_s == 0.5
    await asyncio.wait_for(watch.ended.wait(), 30)
    assert watch.notes == ["cancelled on b"]


async def test_callee_and_nested_calls_see_the_deadline(a: Worker) -> None:
    ask: Any = a.peer("b").call
    assert await ask(remote.time_left) is None
    async with asyncrpc.deadline(5):
        assert 3 < await ask(remote.time_left) <= 5
        assert 3 < await ask(remote.forward, ["c", "a"], remote.time_left) <= 5


async def test_deadlines_nest_and_the_earliest_counts(a: Worker) -> None:
    ask: Any = partial(a.peer("b").call, remote.time_left)
    async with asyncrpc.deadline(5):
        async with asyncrpc.deadline(50), asyncrpc.deadline(None):
            assert await ask() <= 5
        async with asyncrpc.deadline(2):
            assert await ask() <= 2
    assert await ask() is None


async def test_a_thread_passes_its_deadline_on(a: Worker) -> None:
    async with asyncrpc.deadline(5):
        left = await a.peer("b").call(remote.forward_sync, ["c"], remote.time_left)
        assert 3 < left <= 5


async def test_the_argument_timeout_limits_one_call(a: Worker, watch: Watch) -> None:
    with acting_as(a):
        call = asyncrpc.rpc_async("b", remote.wait_for_ever, ("w",), timeout_s=0.05)
        with pytest.raises(DeadlineExceededError):
            await call
        left: Any = await asyncrpc.rpc_async("b", remote.time_left, timeout_s=3)
        assert 1 < left <= 3


async def test_default_timeout_applies_and_none_lifts_it() -> None:
    async with Cluster(2, options=Options(rpc_timeout_s=4.0)) as (a, _):
        left: Any = await a.peer("b").call(remote.time_left)
        assert left <= 4
        with acting_as(a):
            left = await asyncrpc.rpc_async("b", remote.time_left, timeout_s=None)
            assert left is None


async def test_passed_deadline_sends_no_call(a: Worker, watch: Watch) -> None:
    for _ in range(2):  # not connected, then connected
        with pytest.raises(DeadlineExceededError) as caught:
            async with asyncrpc.deadline(0):
                await a.peer("b").call(remote.note, "w", "ran")
        assert caught.value.outcome is Outcome.NOT_EXECUTED
        await a.peer("b").call(remote.add, 1)
    assert watch.notes == []


async def test_call_expired_in_the_queue_is_dropped(watch: Watch) -> None:
    async with Cluster(2, options=Options(threads=1)) as (a, b):
        first = a.parts.start_call("b", remote.pass_gate, ("w",))
        await watch.begun.wait()
        with pytest.raises(DeadlineExceededError):
            async with asyncrpc.deadline(0.05):
                await a.peer("b").call(remote.note, "w", "ran")
        watch.gate.set()
        assert await first == "through"
        await a.peer("b").call(remote.note, "w", "after")
        assert watch.notes == ["after"]
        assert not b.parts.active


async def test_deadline_ends_the_last_call_of_a_chain(a: Worker, watch: Watch) -> None:
    await a.peer("b").call(remote.forward, ["c"], remote.add, 1)
    with pytest.raises(TimeoutError):
        async with asyncrpc.deadline(1):
            await a.peer("b").call(remote.forward, ["c"], remote.wait_for_ever, "w")
    await asyncio.wait_for(watch.ended.wait(), 30)
    assert watch.notes == ["cancelled on c"]


async def test_timed_out_wait_leaves_future_running(a: Worker, watch: Watch) -> None:
    assert await a.peer("b").call(remote.wait_briefly, "c", "w") == ("timed out", 1)


async def test_deadline_limits_a_block_without_calls(trio: Trio) -> None:
    async with asyncio.timeout(30):
        with pytest.raises(TimeoutError):
            async with asyncrpc.deadline(0.05):
                await asyncio.Event().wait()


@pytest.mark.parametrize("timeout_s", [-1, float("nan"), float("inf")])
async def test_invalid_deadline_is_refused(timeout_s: float) -> None:
    with pytest.raises(asyncrpc.UsageError, match="number of seconds"):
        async with asyncrpc.deadline(timeout_s):
            pass
