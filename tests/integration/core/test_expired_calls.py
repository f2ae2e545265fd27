"""Calls given up while their functions wait for a thread, or go on in one."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any, Final

import pytest
import torch

from asyncrpc import Options, Worker, autograd, expose
from asyncrpc.errors import DeadlineExceededError
from asyncrpc.testing import Cluster, acting_as
from tests.integration.core.company import calls_over
from tests.integration.core.groups import until

let_go = threading.Event()
entered = threading.Event()
ran: list[int] = []


@expose
def hold(number: int) -> int:
    ran.append(number)
    let_go.wait()
    return number


async def test_call_expired_before_it_has_a_thread_never_runs() -> None:
    let_go.clear()
    ran.clear()
    async with Cluster(2, options=Options(threads=1)) as (a, b):
        peer = a.peer("b")
        first = a.parts.start_call("b", hold, (1,))
        with pytest.raises(DeadlineExceededError):
            # Before the worker starts a thread because no call ends.
            await peer.using(timeout_s=0.02).call(hold, 2)
        last = a.parts.start_call("b", hold, (3,))  # behind the second one
        let_go.set()
        assert [await first, await last] == [1, 3]
        assert b.parts.pool.unfinished == 0
    assert sorted(ran) == [1, 3]  # at once, if the worker has started one more thread


class Holder:
    """Its method runs in a thread until the gate is open."""

    def hold(self, value: torch.Tensor) -> torch.Tensor:
        return hold_in_thread(value)


@expose
def hold_in_thread(value: torch.Tensor) -> torch.Tensor:
    entered.set()
    let_go.wait()
    return value + 1


@expose
def hold_in_generator(value: torch.Tensor) -> Iterator[torch.Tensor]:
    yield hold_in_thread(value)


async def wait_for_call(worker: Worker, timeout_s: float | None) -> object:
    peer = worker.peer("b").using(timeout_s=timeout_s)
    return await peer.call(hold_in_thread, torch.ones(2, requires_grad=True))


async def wait_for_item(worker: Worker, timeout_s: float | None) -> object:
    peer = worker.peer("b").using(timeout_s=timeout_s)
    return [item async for item in peer.stream(hold_in_generator, torch.ones(2))]


async def wait_for_creation(worker: Worker, timeout_s: float | None) -> object:
    peer = worker.peer("b").using(timeout_s=timeout_s)
    reference = peer.remote(hold_in_thread, torch.ones(2))
    await until(entered.is_set)
    (link,) = worker.parts.directory.links
    if timeout_s is not None:
        await until(lambda: not calls_over(link))  # the callee answers at the deadline
    return await reference.to_here()


async def wait_for_method(worker: Worker, timeout_s: float | None) -> object:
    holder = worker.peer("b").remote(Holder)
    return await holder.rpc_async(timeout_s=timeout_s).hold(torch.ones(2))


WAITS: Final = (wait_for_call, wait_for_item, wait_for_creation, wait_for_method)


@asynccontextmanager
async def holding_pair() -> AsyncIterator[tuple[Worker, Worker]]:
    """Begin with a closed gate; at the end every thread ends, and nothing is left."""
    let_go.clear()
    entered.clear()
    async with Cluster(2) as (a, b):
        try:
            yield a, b
            assert await a.peer("b").call(len, "ab") == 2  # the link serves on
        finally:
            let_go.set()
        await until(lambda: b.parts.pool.unfinished == b.parts.active == 0)
        assert await a.peer("b").call(len, "ab") == 2


@pytest.mark.parametrize("surround", [contextlib.nullcontext, autograd.context])
@pytest.mark.parametrize("wait", WAITS)
async def test_call_expires_while_function_goes_on(wait: Any, surround: Any) -> None:
    async with holding_pair() as (a, _):
        with acting_as(a):
            async with surround():
                with pytest.raises(DeadlineExceededError):
                    await wait(a, 0.2)


@pytest.mark.parametrize("wait", WAITS)
async def test_cancelled_call_ends_though_its_function_continues(wait: Any) -> None:
    async with holding_pair() as (a, _):
        task = asyncio.ensure_future(wait(a, None))
        await until(entered.is_set)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
