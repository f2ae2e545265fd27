"""Virtual time is repeatable and never hangs; leaks are found and named."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import threading

import pytest

from asyncrpc.testing.leaks import ResourceSnapshot
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


def test_unchanged_resources_are_not_a_leak() -> None:
    leaks = ResourceSnapshot.take().compare()
    assert not leaks
    assert leaks.descriptors == leaks.threads == leaks.processes == leaks.tasks == ()


def test_leaked_descriptor_is_named_by_its_target() -> None:
    before = ResourceSnapshot.take()
    descriptor = os.open(os.devnull, os.O_RDONLY)
    try:
        leaks = before.compare(grace_s=0)
        assert leaks.descriptors == (f"{descriptor} (/dev/null)",)
        assert "/dev/null" in str(leaks)
    finally:
        os.close(descriptor)
    assert not before.compare()


def test_reused_descriptor_number_is_still_a_leak() -> None:
    first = os.open(os.devnull, os.O_RDONLY)
    before = ResourceSnapshot.take()
    os.close(first)
    again = os.open("/dev/zero", os.O_RDONLY)
    try:
        assert again == first
        assert before.compare(grace_s=0).descriptors == (f"{again} (/dev/zero)",)
    finally:
        os.close(again)


def test_leaked_thread_is_named() -> None:
    before = ResourceSnapshot.take()
    release = threading.Event()
    thread = threading.Thread(target=release.wait, name="asyncrpc-pool-0")
    thread.start()
    try:
        assert before.compare(grace_s=0).threads == ("asyncrpc-pool-0",)
    finally:
        release.set()
    assert not before.compare()  # it may take a moment to end
    thread.join()


def test_leaked_child_process_is_found_even_when_dead() -> None:
    before = ResourceSnapshot.take()
    child = subprocess.Popen([sys.executable, "-c", ""])
    try:
        assert len(before.compare(grace_s=0).processes) == 1
    finally:
        child.wait()
    assert not before.compare()


async def test_leaked_task_is_named() -> None:
    before = ResourceSnapshot.take()
    release = asyncio.Event()
    task = asyncio.create_task(release.wait(), name="forgotten")
    assert before.compare(grace_s=0).tasks == ("forgotten",)
    release.set()
    assert not await before.compare_async()
    await task
