"""Looks at the tasks of a loop are shared; how long each has waited."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from asyncrpc.testing.loop import SimLoop
from asyncrpc.tools.inspection import loop_tasks
from asyncrpc.tools.inspection.ages import SAMPLE_S, WaitAges
from asyncrpc.tools.inspection.loop_tasks import LoopTasks, tasks_of

SECONDS_MAX = 60.0


async def wait_for_nobody() -> None:
    await asyncio.Event().wait()


async def looks_at(count: int) -> list[LoopTasks]:
    """Look at this loop in so many threads; all looks are kept."""
    loop = asyncio.get_running_loop()
    ages = WaitAges(loop)

    def take() -> LoopTasks:
        return tasks_of(loop, ages, is_thorough=True)

    with ThreadPoolExecutor(count) as pool:
        jobs = [loop.run_in_executor(pool, take) for _ in range(count)]
        return await asyncio.gather(*jobs)


def says_closed(look: LoopTasks, name: str) -> bool:
    (place,) = (
        place for place, task in enumerate(look.tasks) if task.task.get_name() == name
    )
    return look.who_ends(place)[2]


async def test_earlier_snapshots_do_not_count_as_holders() -> None:
    task = asyncio.create_task(wait_for_nobody(), name="alone")
    await asyncio.sleep(0)
    kept = await looks_at(1)
    kept += await looks_at(1)
    kept += await looks_at(4)
    assert [says_closed(look, "alone") for look in kept] == [True] * 6
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


class Scans:
    """Stands in the way of looks at all objects, and counts them."""

    def __init__(self) -> None:
        self.count = 0
        self.begun = threading.Event()
        self.may_end = threading.Event()
        self._look = gc.get_referrers

    def get_referrers(self, *objects: Any) -> list[Any]:
        self.count += 1
        self.begun.set()
        in_time = self.may_end.wait(SECONDS_MAX)
        self.may_end.set()  # whoever looks next need not wait as long
        assert in_time
        return self._look(*objects)


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> Scans:
    counter = Scans()
    monkeypatch.setattr(gc, "get_referrers", counter.get_referrers)
    return counter


def threads_in_turn() -> int:
    """Return how many threads wait for their turn to look."""
    code = loop_tasks._SharedLooks.take.__code__  # noqa: SLF001
    return sum(
        frame.f_code is code and "turn" in frame.f_locals
        for frame in sys._current_frames().values()  # noqa: SLF001
    )


async def waiting_for(turn: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS_MAX):
        while not turn():  # noqa: ASYNC110  (another thread changes it)
            await asyncio.sleep(0.001)


async def test_concurrent_looks_share_the_next_scan(scans: Scans) -> None:
    """The one that has begun is too old for who asks only now."""
    loop = asyncio.get_running_loop()
    task = asyncio.create_task(wait_for_nobody(), name="alone")
    await asyncio.sleep(0)
    ages = WaitAges(loop)

    def take() -> LoopTasks:
        return tasks_of(loop, ages, is_thorough=True)

    with ThreadPoolExecutor(9) as pool:
        first = loop.run_in_executor(pool, take)
        assert await asyncio.to_thread(scans.begun.wait, SECONDS_MAX)
        others = [loop.run_in_executor(pool, take) for _ in range(8)]
        await waiting_for(lambda: threads_in_turn() == 8)
        scans.may_end.set()
        looks = await asyncio.gather(first, *others)
    assert len({id(look) for look in looks[1:]}) == 1
    assert looks[0] is not looks[1]
    assert scans.count == 2
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
async def test_process_forked_during_a_look_may_look(scans: Scans) -> None:
    loop = asyncio.get_running_loop()
    task = asyncio.create_task(wait_for_nobody(), name="alone")
    await asyncio.sleep(0)
    looking = loop.run_in_executor(
        None, lambda: tasks_of(loop, WaitAges(loop), is_thorough=True)
    )
    assert await asyncio.to_thread(scans.begun.wait, SECONDS_MAX)
    child = os.fork()
    if child == 0:  # nobody in it will ever end the look that has begun
        try:
            scans.may_end.set()
            tasks_of(loop, WaitAges(loop), is_thorough=True)
        except BaseException:  # noqa: BLE001
            os._exit(1)
        os._exit(0)
    _, status = await asyncio.to_thread(os.waitpid, child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    scans.may_end.set()
    await looking
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_age_of_a_wait_grows_from_sample_to_sample() -> None:
    async def play() -> None:
        ages, other = WaitAges(asyncio.get_running_loop()), asyncio.Event()

        async def wait() -> None:
            await other.wait()
            await asyncio.Event().wait()

        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        assert ages.age_s(task) == 0.0
        ages.start()
        await asyncio.sleep(10.0)
        assert 10.0 - SAMPLE_S <= ages.age_s(task) <= 10.0
        other.set()  # from now on it waits for something else
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert ages.age_s(task) == 0.0
        await asyncio.sleep(5.0)
        assert 0.0 < ages.age_s(task) <= 5.0
        ages.stop()
        task.cancel()

    with asyncio.Runner(loop_factory=SimLoop) as runner:
        runner.run(play())


def test_repeated_sleep_does_not_age() -> None:
    async def play() -> None:
        ages = WaitAges(asyncio.get_running_loop())

        async def tick() -> None:
            for _ in range(100):
                await asyncio.sleep(0.7)

        task = asyncio.create_task(tick())
        ages.start()
        for _ in range(50):
            await asyncio.sleep(1.0)
            assert ages.age_s(task) <= SAMPLE_S
        ages.stop()
        task.cancel()

    with asyncio.Runner(loop_factory=SimLoop) as runner:
        runner.run(play())


def test_renewed_wait_is_told_from_a_lasting_one() -> None:
    async def play() -> None:
        ages = WaitAges(asyncio.get_running_loop(), sample_s=1.0)
        first, second = asyncio.Event(), asyncio.Event()

        async def wait() -> None:
            await first.wait()
            await second.wait()

        task = asyncio.create_task(wait())
        ages.start()
        await asyncio.sleep(3.5)
        assert len(ages.overdue(2.0)) == 2  # with the one that plays
        assert ages.overdue(4.0) == set()
        await asyncio.sleep(3.0)
        (before,) = (wait for wait in ages.overdue(4.0) if wait[0] == id(task))
        first.set()
        await asyncio.sleep(2.0)
        assert ages.overdue(4.0) == set()
        await asyncio.sleep(4.0)
        (after,) = (wait for wait in ages.overdue(4.0) if wait[0] == id(task))
        assert after != before
        ages.stop()
        task.cancel()

    with asyncio.Runner(loop_factory=SimLoop) as runner:
        runner.run(play())
