"""A worker that `init_rpc` has left running is current where no other is.

Cells of a notebook are tasks of one loop, and so are a fixture and its test: what one
of them starts, the next ones use.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from threading import Thread
from typing import Any

import pytest
import torch

import asyncrpc
from asyncrpc import LocalRendezvous, Worker
from asyncrpc.errors import AlreadyStartedError, NotStartedError
from tests.integration.core import remote
from tests.integration.core.groups import alone


async def start(name: str) -> Worker:
    return await asyncrpc.init_rpc(name, rank=0, rendezvous=LocalRendezvous(1))


@asynccontextmanager
async def left_running(*names: str) -> AsyncIterator[list[Worker]]:
    """Start workers in tasks that end, as cells do."""
    workers = [await asyncio.create_task(start(name)) for name in names]
    try:
        yield workers
    finally:
        for worker in workers:
            await worker.shutdown()


def in_thread(function: Callable[[], Any]) -> list[Any]:
    """Run a function in a thread with a context of its own; return what came out."""
    outcomes: list[Any] = []

    def run() -> None:
        try:
            outcomes.append(function())
        except Exception as error:  # noqa: BLE001  (the test looks at it)
            outcomes.append(error)

    thread = Thread(target=contextvars.Context().run, args=(run,))
    thread.start()
    thread.join()
    return outcomes


async def test_later_tasks_use_the_worker_of_an_earlier_task() -> None:
    async with left_running("w") as [worker]:
        assert asyncrpc.current_worker() is worker
        assert asyncrpc.get_worker_info().name == "w"
        assert await asyncrpc.rpc_async("w", remote.add, (1, 2)) == 3
        assert await asyncrpc.remote("w", remote.add, (2, 3)) == 5
        layer = asyncrpc.nn.RemoteModule("w", torch.nn.Linear, (4, 1))
        async with asyncrpc.autograd.context() as context:
            output = await layer.forward_async(torch.ones(2, 4))
            await asyncrpc.autograd.backward(context, [output.sum()])
        await asyncio.create_task(asyncrpc.shutdown())
        assert worker.is_closed
        with pytest.raises(NotStartedError, match="there is no running worker here"):
            asyncrpc.current_worker()


async def test_plain_threads_use_the_only_worker_of_the_process() -> None:
    async with left_running("w") as [worker]:
        call = asyncio.to_thread(
            in_thread, lambda: asyncrpc.rpc_sync("w", remote.add, (1, 2))
        )
        assert await call == [3]
        assert await asyncio.to_thread(in_thread, asyncrpc.current_worker) == [worker]


async def test_several_workers_are_chosen_by_name_only() -> None:
    async with left_running("b", "a") as [b, a]:
        with pytest.raises(NotStartedError, match=r"has started 'a', 'b': use what it"):
            asyncrpc.current_worker()
        assert asyncrpc.current_worker("a") is a
        assert asyncrpc.current_worker("b") is b
        with pytest.raises(NotStartedError, match=r"has started 'a', 'b'"):
            asyncrpc.current_worker("c")
        async with alone("c") as own:
            assert asyncrpc.current_worker() is own
            assert asyncrpc.current_worker("a") is a
            assert asyncrpc.get_worker_info().name == "c"


async def test_worker_of_a_block_is_current_in_the_block_only() -> None:
    entered, leave = asyncio.Event(), asyncio.Event()

    async def hold(starting: Any) -> None:
        async with starting:
            entered.set()
            await leave.wait()

    for starting in (
        asyncrpc.init_rpc("w", rank=0, rendezvous=LocalRendezvous(1)),
        alone("w"),
    ):
        holding = asyncio.create_task(hold(starting))
        await entered.wait()
        with pytest.raises(NotStartedError, match="there is no running worker here"):
            asyncrpc.current_worker()
        leave.set()
        await holding
        entered.clear()
        leave.clear()


async def test_name_is_refused_until_its_worker_has_ended() -> None:
    async with left_running("w") as [worker]:
        with pytest.raises(AlreadyStartedError, match="already runs on") as refusal:
            await start("w")
        assert "await asyncrpc.shutdown(graceful=False)" in str(refusal.value)
        assert asyncrpc.current_worker() is worker
        async with left_running("other"):  # another name is another worker
            pass
        await asyncrpc.shutdown(graceful=False)
        async with left_running("w") as [again]:
            assert asyncrpc.current_worker() is again


async def test_worker_of_another_loop_is_not_current() -> None:
    async def elsewhere() -> None:
        asyncrpc.current_worker()

    async with left_running("w"):
        [error] = await asyncio.to_thread(in_thread, lambda: asyncio.run(elsewhere()))
        assert isinstance(error, NotStartedError)
        assert "'w' runs on another event loop than this" in str(error)


def test_call_refuses_a_loop_that_does_not_run() -> None:
    """A terminal runs its loop for each line that awaits, and not between them."""
    with asyncio.Runner() as runner:
        worker = runner.run(start("w"))
        with pytest.raises(NotStartedError, match="loop that does not run now"):
            contextvars.Context().run(asyncrpc.rpc_sync, "w", remote.add, (1, 2))
        assert runner.run(call_here()) == 3
        runner.run(worker.shutdown())


async def call_here() -> Any:
    return await asyncrpc.rpc_async("w", remote.add, (1, 2))


async def test_the_worker_of_a_task_that_was_shut_down_is_not_replaced() -> None:
    async with left_running("w"), alone("own") as own:
        await asyncio.create_task(own.shutdown())
        with pytest.raises(NotStartedError, match="'own' does not run"):
            asyncrpc.current_worker()
