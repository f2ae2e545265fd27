"""What a worker tells of its tasks, threads and calls."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest_asyncio

from asyncrpc import LocalRendezvous, Worker
from asyncrpc.core.loop.waits import WaitKind
from asyncrpc.tools.inspection.ages import WaitAges
from asyncrpc.tools.inspection.collecting import snapshot_of
from asyncrpc.tools.inspection.loop_tasks import SUBJECTS_MAX
from asyncrpc.tools.inspection.records import Actor, Wait, WorkerSnapshot


@pytest_asyncio.fixture
async def worker() -> AsyncIterator[Worker]:
    alone = LocalRendezvous(1)
    async with Worker("a", rank=0, world_size=1, rendezvous=alone) as started:
        yield started


async def look(worker: Worker, *, is_thorough: bool = True) -> WorkerSnapshot:
    def take() -> WorkerSnapshot:
        ages = WaitAges(worker.loop)
        return snapshot_of(worker.parts, ages, is_thorough=is_thorough)

    return await asyncio.to_thread(take)


async def wait_of(worker: Worker, coroutine: Coroutine[Any, Any, None]) -> Wait:
    """Return what a task waits for that runs a coroutine."""
    task = asyncio.create_task(coroutine, name="looked at")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    try:
        return named(await look(worker), "looked at").wait
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def named(snapshot: WorkerSnapshot, name: str) -> Actor:
    (actor,) = (actor for actor in snapshot.actors if actor.name == name)
    return actor


class TestWhatNobodyCanEnd:
    async def test_event_known_to_its_waiter_alone_is_closed(
        self, worker: Worker
    ) -> None:
        async def wait() -> None:
            alone = asyncio.Event()
            await alone.wait()

        wait_found = await wait_of(worker, wait())
        assert (wait_found.kind, wait_found.what) == (WaitKind.EVENT, "Event `alone`")
        assert wait_found.is_closed

    async def test_event_set_by_a_timer_is_not_closed(self, worker: Worker) -> None:
        async def wait() -> None:
            later = asyncio.Event()
            timer = asyncio.get_running_loop().call_later(3600.0, later.set)
            try:
                await later.wait()
            finally:
                timer.cancel()

        assert not (await wait_of(worker, wait())).is_closed

    async def test_event_held_elsewhere_is_not_closed(self, worker: Worker) -> None:
        kept = [asyncio.Event()]

        async def wait() -> None:
            await kept[0].wait()

        assert not (await wait_of(worker, wait())).is_closed

    async def test_search_for_holders_is_bounded(self, worker: Worker) -> None:
        async def wait() -> None:
            alone = asyncio.Event()
            kept.append(alone)  # for as long as the task lives
            await alone.wait()

        kept: list[asyncio.Event] = []
        tasks = [asyncio.create_task(wait()) for _ in range(2 * SUBJECTS_MAX)]
        await asyncio.sleep(0)
        events = list(kept)
        kept.clear()
        del events
        snapshot = await look(worker)
        assert sum(actor.wait.is_closed for actor in snapshot.actors) == SUBJECTS_MAX
        snapshot = await look(worker, is_thorough=False)
        assert not any(actor.wait.is_closed for actor in snapshot.actors)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_task_that_could_set_an_event_is_named(worker: Worker) -> None:
    go, rest = asyncio.Event(), asyncio.Event()

    async def setter(event: asyncio.Event) -> None:
        await rest.wait()
        event.set()

    task = asyncio.create_task(setter(go), name="setter")
    await asyncio.sleep(0)
    other = asyncio.create_task(go.wait(), name="waiter")
    await asyncio.sleep(0)
    snapshot = await look(worker)
    wait = named(snapshot, "waiter").wait
    assert not wait.is_sure
    assert "setter" in {snapshot.actors[actor].name for actor in wait.actors}
    rest.set()
    await asyncio.gather(task, other)


async def test_executor_job_leads_to_its_thread(worker: Worker) -> None:
    go, begun = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        go.wait()

    task = asyncio.create_task(asyncio.to_thread(hold), name="holder")
    await asyncio.to_thread(begun.wait)
    snapshot = await look(worker)
    wait = named(snapshot, "holder").wait
    assert wait.kind is WaitKind.THREADS
    (thread,) = (snapshot.actors[actor] for actor in wait.actors)
    assert thread.wait.what == "go.wait()"
    go.set()
    await task


async def test_event_loop_and_its_own_tasks_are_known(worker: Worker) -> None:
    snapshot = await look(worker)
    assert snapshot.actors[snapshot.loop_actor].name == threading.current_thread().name
    assert [actor for actor in snapshot.actors if not actor.is_internal]
    assert not snapshot.made
    assert not snapshot.served
