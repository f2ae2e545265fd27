"""Futures are completed in threads: in one, unless what it runs blocks."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from asyncrpc.compat.rpc.agent import TICK_S, Completions
from asyncrpc.compat.rpc.promises import Promise
from asyncrpc.core.loop.threads import ThreadPool
from asyncrpc.errors import ClosedError, RejectedError

Done = Callable[[Any, BaseException | None], None]


class Pool:
    """Threads that run what they were given when their test says so."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Callable[[], Any], Done]] = []
        self.is_closed = False

    def submit(self, job: Callable[[], Any], done: Done) -> None:
        if self.is_closed:
            raise RejectedError("the worker is closing")
        self.jobs.append((job, done))

    def work(self) -> None:
        """Let a thread run all that it finds, and the loop learn of its end."""
        job, done = self.jobs.pop(0)
        job()
        done(None, None)


class Ticks:
    """The timer of a loop, which acts when its test says so."""

    def __init__(self) -> None:
        self.actions: list[Callable[[], None]] = []

    def call_later(self, delay_s: float, action: Callable[[], None]) -> object:
        assert delay_s == TICK_S
        self.actions.append(action)
        return self

    def tick(self) -> None:
        (action,) = self.actions
        self.actions.clear()
        action()


@pytest.fixture
def pool() -> Pool:
    return Pool()


@pytest.fixture
def ticks() -> Ticks:
    return Ticks()


@pytest.fixture
def completions(pool: Pool, ticks: Ticks) -> Completions:
    loop: Any = ticks
    return Completions(pool.submit, loop)


def noted(into: list[int], number: int) -> Callable[[], None]:
    return lambda: into.append(number)


def test_first_thread_runs_all_jobs_in_order(
    completions: Completions, pool: Pool
) -> None:
    ran: list[int] = []
    for number in range(5):
        completions.run(noted(ran, number))
    assert len(pool.jobs) == 1
    pool.work()
    assert ran == [0, 1, 2, 3, 4]
    assert not pool.jobs


def test_job_that_comes_as_the_thread_ends_gets_another_thread(
    completions: Completions, pool: Pool
) -> None:
    ran: list[int] = []
    completions.run(noted(ran, 0))
    job, done = pool.jobs.pop()
    job()
    completions.run(noted(ran, 1))  # the loop has not heard that the thread has ended
    assert not pool.jobs
    done(None, None)
    pool.work()
    assert ran == [0, 1]


def test_job_that_waits_longer_than_a_tick_gets_another_thread(
    completions: Completions, pool: Pool, ticks: Ticks
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    ran: list[int] = []

    def block() -> None:
        begun.set()
        assert go_on.wait(60.0)

    completions.run(block)
    ((first, _),) = pool.jobs
    pool.jobs.clear()
    thread = threading.Thread(target=first)
    thread.start()
    assert begun.wait(60.0)
    completions.run(noted(ran, 1))
    completions.run(noted(ran, 2))
    ticks.tick()  # they may have come just before
    assert not pool.jobs
    for _ in range(3):
        ticks.tick()  # once: the pool may have no thread for it
        assert len(pool.jobs) == 1
    pool.work()
    assert ran == [1, 2]
    go_on.set()
    thread.join()


def test_new_job_gets_no_further_thread(
    completions: Completions, pool: Pool, ticks: Ticks
) -> None:
    completions.run(noted([], 0))
    ticks.tick()
    pool.work()
    completions.run(noted([], 1))
    ticks.tick()
    assert len(pool.jobs) == 1


def test_timer_stops_when_no_job_waits(
    completions: Completions, pool: Pool, ticks: Ticks
) -> None:
    completions.run(noted([], 0))
    pool.work()
    ticks.tick()
    assert not ticks.actions
    completions.run(noted([], 1))
    assert len(ticks.actions) == 1


def test_failing_job_stops_no_other_job(completions: Completions, pool: Pool) -> None:
    def fail() -> None:
        raise ValueError

    ran: list[int] = []
    completions.run(fail)
    completions.run(noted(ran, 1))
    job, done = pool.jobs.pop()
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (it has no text)
        job()
    done(None, caught.value)
    pool.work()
    assert ran == [1]


@pytest.mark.parametrize("is_dropped", [False, True])
def test_job_runs_even_if_the_pool_refuses_or_drops_it(
    completions: Completions, pool: Pool, *, is_dropped: bool
) -> None:
    ran = threading.Event()
    pool.is_closed = not is_dropped
    completions.run(ran.set)
    for _job, done in pool.jobs:
        done(None, ClosedError("the worker was shut down before it ran"))
    assert ran.wait(60.0)


def test_waiting_job_runs_even_after_the_loop_ends(
    completions: Completions, pool: Pool
) -> None:
    later, ended = threading.Event(), threading.Event()

    def wait() -> None:
        assert later.wait(60.0)
        ended.set()

    completions.run(wait)
    ((job, _),) = pool.jobs
    threading.Thread(target=job, daemon=True).start()
    completions.run(later.set)
    completions.finish()
    assert ended.wait(60.0)


async def test_job_may_wait_for_a_later_job() -> None:
    loop = asyncio.get_running_loop()
    pool = ThreadPool("test", 4, loop)
    completions = Completions(pool.submit, loop)
    later, ended = threading.Event(), asyncio.Event()

    def wait() -> None:
        assert later.wait(60.0)
        loop.call_soon_threadsafe(ended.set)

    for _ in range(3):
        completions.run(wait)
    completions.run(later.set)
    await ended.wait()
    assert await pool.close(60.0) == []


class HereAtOnce:
    """An agent whose jobs run where they are given."""

    def in_thread(self, job: Callable[[], Any], /) -> None:
        job()

    def rank_of(self, name: str, /) -> int:
        raise LookupError(name)


async def completed(limit_s: float | None) -> Any:
    call: Any = asyncio.get_running_loop().create_future()
    promise = Promise(HereAtOnce(), lambda: call, limit_s)
    promise.begin()
    call.set_result(7)
    await asyncio.sleep(0)  # its callbacks run
    return promise.future.value()


@pytest.mark.parametrize("limit_s", [None, 3600.0])
async def test_result_within_limit_completes_the_future(limit_s: float | None) -> None:
    assert await completed(limit_s) == 7


async def test_result_after_the_limit_is_a_timeout() -> None:
    with pytest.raises(RuntimeError, match="RPC ran for more than set timeout"):
        await completed(1e-9)


async def test_call_that_cannot_start_fails_its_future() -> None:
    def refuse() -> Any:
        raise ValueError("the arguments cannot travel")

    promise = Promise(HereAtOnce(), refuse)
    promise.begin_or_fail()
    with pytest.raises(ValueError, match="cannot travel"):
        promise.future.wait()


async def test_arguments_are_released_when_the_call_begins() -> None:
    class Argument:
        pass

    call: Any = asyncio.get_running_loop().create_future()
    argument = Argument()
    seen = weakref.ref(argument)
    promise = Promise(HereAtOnce(), partial(lambda _argument: call, argument))
    del argument
    promise.begin()
    assert seen() is None
