"""How long tasks have waited for the same thing."""

from __future__ import annotations

import asyncio

from asyncrpc.testing.loop import SimLoop
from asyncrpc.tools.inspection.ages import SAMPLE_S, WaitAges


def test_age_of_a_wait_grows_from_sample_to_sample() -> None:
    async def play() -> None:
        loop = asyncio.get_running_loop()
        ages, other = WaitAges(loop), asyncio.Event()

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
