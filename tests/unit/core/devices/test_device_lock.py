"""An exclusive pool runs one function at a time, and never waits for itself."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from asyncrpc.core.devices.device_lock import DeviceLock
from asyncrpc.core.devices.names import DeviceName
from asyncrpc.core.loop.threads import ThreadPool
from asyncrpc.devices import lock
from asyncrpc.errors import UsageError


class Watch:
    """Counts who is inside."""

    def __init__(self) -> None:
        self.inside = 0
        self.most = 0

    def work(self) -> None:
        self.inside += 1
        self.most = max(self.most, self.inside)
        time.sleep(0.005)
        self.inside -= 1


@asynccontextmanager
async def pools(
    *locks: DeviceLock,
    begin: Callable[[], None] | None = None,
    settle: Callable[[], None] | None = None,
) -> AsyncIterator[list[ThreadPool]]:
    loop = asyncio.get_running_loop()
    thread_pools = [
        ThreadPool(f"t{at}", 4, loop, device_lock=lock, begin=begin, settle=settle)
        for at, lock in enumerate(locks)
    ]
    yield thread_pools
    for pool in thread_pools:
        assert await pool.close(5.0) == []


def start(pool: ThreadPool, job: Callable[[], Any]) -> asyncio.Future[Any]:
    done = asyncio.get_running_loop().create_future()

    def finish(result: Any, error: BaseException | None) -> None:
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)

    pool.submit(job, finish)
    return done


def at(*names: str) -> DeviceLock:
    return DeviceLock(tuple(map(DeviceName.parse, names)))


@pytest.mark.parametrize(
    ("locks", "most"),
    [
        ([at("xla:0")], 1),
        ([at("xla:0"), at("xla:0")], 1),
        ([at("xla:0"), at("xla:1")], 2),
        ([at("xla"), at("xla:1")], 1),
        ([at("xla"), at("abacus")], 2),
        ([at("xla:0", "xla:1"), at("xla:1", "xla:2")], 1),
        ([at("xla:0"), at("xla:1"), at("xla:0", "xla:1")], 2),
        ([at(), at("xla:1")], 1),
        ([at(), at()], 1),
    ],
)
async def test_device_runs_one_function_at_a_time(
    locks: list[DeviceLock], most: int
) -> None:
    watch = Watch()
    async with pools(*locks) as thread_pools:
        jobs = [start(pool, watch.work) for _ in range(10) for pool in thread_pools]
        await asyncio.gather(*jobs)
    assert watch.most == most


async def test_pool_of_two_devices_is_not_starved() -> None:
    """It gets both, though each is in use all the time."""
    ended: list[str] = []
    async with pools(at("xla:0"), at("xla:1"), at("xla")) as thread_pools:
        jobs = []
        for number in range(10):
            for pool in thread_pools[:2]:
                jobs.append(start(pool, lambda: time.sleep(0.002)))  # noqa: PERF401
            if number == 3:
                jobs.append(start(thread_pools[2], lambda: ended.append("both")))
        jobs.append(start(thread_pools[0], lambda: ended.append("last")))
        await asyncio.gather(*jobs)
    assert ended == ["both", "last"]


async def test_function_that_waits_lets_nested_calls_in() -> None:
    """To any depth; and is alone again afterwards."""
    watch, loop = Watch(), asyncio.get_running_loop()
    both = at("xla:0")
    async with pools(both, both) as thread_pools:

        def nested(depth: int) -> int:
            watch.work()
            if depth:
                pool = thread_pools[depth % 2]
                inner = asyncio.run_coroutine_threadsafe(
                    _started(pool, lambda: nested(depth - 1)), loop
                )
                with thread_pools[0].blocked(), thread_pools[1].blocked():
                    inner.result()
            watch.work()
            return depth

        depths = await asyncio.gather(
            *(start(thread_pools[at % 2], lambda: nested(6)) for at in range(3))
        )
        assert depths == [6, 6, 6]
    assert watch.most == 1


async def _started(pool: ThreadPool, job: Callable[[], Any]) -> Any:
    return await start(pool, job)


async def test_devices_are_synchronized_however_a_job_ends() -> None:
    done: list[str] = []
    begin, settle = partial(done.append, "begun"), partial(done.append, "settled")
    async with pools(at(), begin=begin, settle=settle) as (pool,):
        await start(pool, lambda: done.append("job"))
        with pytest.raises(ZeroDivisionError):
            await start(pool, lambda: 1 / 0)
    assert done == ["begun", "job", "settled", "begun", "settled"]


async def test_device_lock_is_refused_on_an_event_loop() -> None:
    with pytest.raises(UsageError, match=r"asyncrpc\.devices\.run"), lock():
        pass


def test_threads_of_the_program_share_the_device_lock() -> None:
    watch = Watch()

    def use() -> None:
        for _ in range(5):
            with lock():
                watch.work()

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert watch.most == 1
