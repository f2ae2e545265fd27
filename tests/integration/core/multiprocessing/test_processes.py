"""The handle that `launch(join=False)` returns."""

from __future__ import annotations

import asyncio
import multiprocessing

import pytest

from asyncrpc.errors import ProcessFailedError, UsageError
from asyncrpc.multiprocessing import Processes, Queue, launch
from tests.integration.core.multiprocessing import targets


def start_waiting(nprocs: int = 2) -> Processes[None]:
    return launch(targets.wait_forever, nprocs=nprocs, method="forkserver", join=False)


async def test_wait_async_keeps_the_loop_running() -> None:
    async with launch(
        targets.square, (2,), nprocs=2, method="forkserver", join=False
    ) as processes:
        waiting = asyncio.create_task(processes.wait_async())
        await asyncio.sleep(0)
        assert not waiting.done()
        assert await waiting == [0, 1]
        assert await processes.wait_async() == [0, 1]  # as often as one likes


async def test_a_failure_is_raised_where_it_is_awaited() -> None:
    processes = launch(targets.fail_at, (0,), nprocs=2, method="forkserver", join=False)
    with pytest.raises(ProcessFailedError, match="rank 0 of 2"):
        await processes.wait_async()


async def test_cancelling_the_wait_leaves_the_processes_alone() -> None:
    processes = launch(targets.square, (2,), nprocs=2, method="forkserver", join=False)
    waiting = asyncio.create_task(processes.wait_async())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await processes.wait_async() == [0, 1]


async def test_exception_in_the_block_stops_the_processes() -> None:
    with pytest.raises(KeyError):
        async with start_waiting():
            raise KeyError("mine")
    assert multiprocessing.active_children() == []


def test_exception_in_a_plain_block_stops_the_processes() -> None:
    with pytest.raises(KeyError), start_waiting():
        raise KeyError("mine")
    assert multiprocessing.active_children() == []


def test_block_raises_the_failure_of_its_processes() -> None:
    with (
        pytest.raises(ProcessFailedError, match="no luck"),
        launch(targets.fail_at, (1,), nprocs=2, method="forkserver", join=False),
    ):
        pass


def test_terminated_ranks_are_named_as_stopped() -> None:
    with start_waiting() as processes:
        processes.terminate()
    with pytest.raises(ProcessFailedError, match=r"ranks 0, 1 stopped.*terminate"):
        processes.wait()
    processes.terminate()  # again, after the end: nothing
    assert multiprocessing.active_children() == []


async def test_blocking_wait_on_a_loop_is_refused() -> None:
    async with start_waiting(1) as processes:
        with pytest.raises(UsageError, match="wait_async"):
            processes.wait()
        processes.terminate()


def test_invalid_grace_ends_no_process() -> None:
    queue: Queue[int] = Queue()
    with launch(targets.take, (queue,), method="forkserver", join=False) as processes:
        with pytest.raises(UsageError, match="grace_s must be a finite number"):
            processes.terminate("soon")  # type: ignore[arg-type]
        queue.put(5)
        assert processes.wait() == [5]
    queue.close()
