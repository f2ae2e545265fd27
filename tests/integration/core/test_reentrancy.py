"""Calls that call back never wait for the thread that waits for them."""

from __future__ import annotations

import asyncio

import pytest

from asyncrpc import Options, UsageError, Worker
from asyncrpc.testing import Cluster, acting_as
from tests.integration.core import remote
from tests.integration.core.conftest import Trio
from tests.integration.core.groups import processes

DEPTH = 16
CALLERS = 64


async def test_a_callee_calls_back_while_its_caller_awaits(wired: Trio) -> None:
    a, _, _ = wired
    result = await a.peer("b").call(remote.forward, ["a", "c", "a"], remote.where_async)
    assert result[0] == "a"


async def test_a_callee_calls_back_while_its_caller_blocks(wired: Trio) -> None:
    a, _, _ = wired
    for function in (remote.forward_sync, remote.forward_waiting):
        result = await a.peer("b").call(function, ["a", "c", "a", "b"], remote.where)
        assert result[0] == "b"


async def test_deep_chains_of_blocking_calls_finish_with_two_threads() -> None:
    async with Cluster(2, options=Options(threads=2)) as (a, b):
        chains = [
            caller.peer(to).call(remote.bounce, to, caller.name, DEPTH)
            for _ in range(CALLERS // 2)
            for caller, to in ((a, "b"), (b, "a"))
        ]
        assert await asyncio.gather(*chains) == [DEPTH] * CALLERS


async def test_deep_chains_of_coroutines_finish(a: Worker) -> None:
    chains = [
        a.peer("b").call(remote.bounce_async, "b", "a", DEPTH) for _ in range(CALLERS)
    ]
    assert await asyncio.gather(*chains) == [DEPTH] * CALLERS


async def test_mutually_waiting_threads_get_another_thread() -> None:
    """The first call holds the only thread until the second one has run."""
    async with Cluster(2, options=Options(threads=1)) as (a, _):
        remote.watches["gate"] = watch = remote.Watch()
        first = asyncio.create_task(a.peer("b").call(remote.pass_gate, "gate"))
        await watch.begun.wait()
        await a.peer("b").call(remote.open_gate, "gate")
        assert await first == "through"


async def test_blocking_on_the_loop_is_refused_before_sending(a: Worker) -> None:
    with acting_as(a):
        future = a.parts.start_call("b", remote.add, (1,))
        with pytest.raises(UsageError, match="would stop the event loop"):
            future.wait()
        assert await future == 2
    with pytest.raises(UsageError, match=r"await asyncrpc\.rpc_async"):
        await a.peer("b").call(remote.block_on_loop, "c")


async def test_chains_cross_processes() -> None:
    async with processes("b") as a:
        assert await a.peer("b").call(remote.bounce, "b", "a", DEPTH) == DEPTH
        assert await a.peer("b").call(remote.bounce_async, "b", "a", DEPTH) == DEPTH
        pids = {(await a.peer(to).call(remote.where_async))[1] for to in ("a", "b")}
        assert len(pids) == 2
