"""Calls to a worker that somebody starts wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

import asyncrpc.extend
from asyncrpc import JoinRendezvous, Worker, WorkerLostError
from asyncrpc.errors import ClusterError, UnknownWorkerError
from tests.integration.core.groups import alone


async def test_calls_wait_for_an_expected_worker() -> None:
    async with alone("a") as a:
        started = asyncrpc.extend.host_of(a).expect("b")
        peer = a.peer("b")
        call = asyncio.create_task(peer.call(len, "abc"))
        reference = peer.remote(len, "abcd")
        stream = peer.stream(range_of, 2)
        first = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        assert not call.done()
        async with Worker("b", rendezvous=JoinRendezvous(a.addresses)):
            started.set_result(None)
            assert await call == 3
            assert await reference == 4
            assert await first == 0
            assert await peer.call(len, "ab") == 2
            await stream.aclose()
            del reference


async def range_of(count: int) -> AsyncIterator[int]:
    for number in range(count):
        yield number


async def test_calls_raise_why_an_expected_worker_did_not_start() -> None:
    async with alone("a") as a:
        started = asyncrpc.extend.host_of(a).expect("b")
        call = asyncio.create_task(a.peer("b").call(len, "abc"))
        await asyncio.sleep(0)
        started.set_exception(ClusterError("worker 'b' did not start: no space"))
        with pytest.raises(ClusterError, match="no space"):
            await call
        with pytest.raises(UnknownWorkerError):
            a.peer("b")


async def test_deadline_of_a_call_to_an_expected_worker_holds() -> None:
    async with alone("a") as a:
        asyncrpc.extend.host_of(a).expect("b")
        with pytest.raises(asyncrpc.DeadlineExceededError):
            await a.peer("b").using(timeout_s=0.01).call(len, "abc")


async def test_cancelled_call_leaves_the_others_waiting() -> None:
    async with alone("a") as a:
        started = asyncrpc.extend.host_of(a).expect("b")
        calls = [asyncio.create_task(a.peer("b").call(len, "abc")) for _ in range(2)]
        await asyncio.sleep(0)
        calls[0].cancel()
        async with Worker("b", rendezvous=JoinRendezvous(a.addresses)):
            started.set_result(None)
            assert await calls[1] == 3
            assert calls[0].cancelled()


async def test_expected_worker_that_runs_answers_at_once() -> None:
    async with alone("a") as a:
        async with Worker("b", rendezvous=JoinRendezvous(a.addresses)):
            assert await a.peer("b").call(len, "abc") == 3
            started = asyncrpc.extend.host_of(a).expect("b")
            assert await a.peer("b").call(len, "abc") == 3
        call = asyncio.create_task(a.peer("b").call(len, "abc"))
        await asyncio.sleep(0)
        started.cancel()
        with pytest.raises((WorkerLostError, asyncio.CancelledError)):
            await call
