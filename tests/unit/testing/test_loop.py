"""Virtual time: repeatable, quick, and never a hang."""

from __future__ import annotations

import asyncio
import random
import threading

import pytest

from asyncrpc.testing.loop import DeadlockError, SimLoop


def simulate(seed: int) -> list[tuple[float, str]]:
    rng = random.Random(seed)
    trace: list[tuple[float, str]] = []

    async def worker(name: str) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(50):
            try:
                async with asyncio.timeout(rng.expovariate(0.01)):
                    await asyncio.sleep(rng.expovariate(0.01))
                trace.append((loop.time(), f"{name} slept"))
            except TimeoutError:
                trace.append((loop.time(), f"{name} timed out"))

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            for index in range(20):
                tasks.create_task(worker(f"w{index}"))

    with asyncio.Runner(loop_factory=SimLoop) as runner:
        runner.run(main())
    return trace


def test_same_seed_gives_the_same_run() -> None:
    first, again, other = simulate(1), simulate(1), simulate(2)
    assert first == again
    assert first != other
    assert first[-1][0] > 3000  # which no test would have time for


def test_deadlock_names_the_tasks_and_their_waits() -> None:
    async def waits_in_vain() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(waits_in_vain(), name="stuck-one")

    with (
        pytest.raises(DeadlockError, match=r"stuck-one.*waits_in_vain") as caught,
        asyncio.Runner(loop_factory=SimLoop) as runner,
    ):
        runner.run(main())
    assert len(caught.value.stuck) == 2


def test_executor_runs_in_place() -> None:
    async def main() -> tuple[int, str]:
        where = await asyncio.to_thread(threading.get_ident)
        try:
            await asyncio.to_thread(int, "x")
        except ValueError as error:
            return where, str(error)
        return where, ""

    with asyncio.Runner(loop_factory=SimLoop) as runner:
        where, message = runner.run(main())
    assert where == threading.get_ident()
    assert "invalid literal" in message


def test_call_soon_threadsafe_works_in_the_thread_of_the_loop() -> None:
    async def main() -> None:
        loop, woken = asyncio.get_running_loop(), asyncio.Event()
        loop.call_soon_threadsafe(woken.set)
        await woken.wait()

    with asyncio.Runner(loop_factory=SimLoop) as runner:
        runner.run(main())


def test_call_soon_threadsafe_is_refused_from_another_thread() -> None:
    caught: list[str] = []

    def wake(loop: asyncio.AbstractEventLoop) -> None:
        try:
            loop.call_soon_threadsafe(int)
        except RuntimeError as error:
            caught.append(str(error))

    async def main() -> None:
        thread = threading.Thread(
            target=wake, args=(asyncio.get_running_loop(),), name="intruder"
        )
        thread.start()
        thread.join()

    with asyncio.Runner(loop_factory=SimLoop) as runner:
        runner.run(main())
    assert "intruder" in caught[0]
