"""What a worker tells of its tasks, threads, calls and collectives."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest
import pytest_asyncio
import torch

from asyncrpc import Group, LocalRendezvous, Worker
from asyncrpc.core.loop.waits import WaitKind
from asyncrpc.errors import CollectiveError
from asyncrpc.testing import Cluster
from asyncrpc.tools.inspection.ages import WaitAges
from asyncrpc.tools.inspection.collecting import snapshot_of
from asyncrpc.tools.inspection.collective_records import CLOSED, UNDER_WAY
from asyncrpc.tools.inspection.histories import history_of
from asyncrpc.tools.inspection.loop_tasks import SUBJECTS_MAX
from asyncrpc.tools.inspection.records import ObservedActor, Wait, WorkerSnapshot
from asyncrpc.trace import RECENT_MAX


@pytest_asyncio.fixture
async def worker() -> AsyncIterator[Worker]:
    alone = LocalRendezvous(1)
    async with Worker("a", rank=0, world_size=1, rendezvous=alone) as started:
        yield started


async def look(worker: Worker, *, is_thorough: bool = True) -> WorkerSnapshot:
    def take() -> WorkerSnapshot:
        return snapshot_of(worker.parts, WaitAges(worker.loop), is_thorough=is_thorough)

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


def named(snapshot: WorkerSnapshot, name: str) -> ObservedActor:
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


@pytest_asyncio.fixture
async def pair() -> AsyncIterator[tuple[Worker, Worker]]:
    async with Cluster(2) as (a, b):
        yield a, b


def groups_of(pair: tuple[Worker, Worker], name: str = "") -> list[Group]:
    return [Group(worker, ["a", "b"], name=name, timeout_s=None) for worker in pair]


async def reduce_in(groups: list[Group]) -> None:
    await asyncio.gather(*(group.all_reduce(torch.ones(2, 3)) for group in groups))


async def test_new_worker_has_an_empty_history(pair: tuple[Worker, Worker]) -> None:
    history = history_of(pair[0].parts)
    assert (history.name, history.rank) == ("a", 0)
    assert (history.groups, history.collectives, history.is_whole) == ((), (), True)


async def test_ended_collectives_are_in_history(pair: tuple[Worker, Worker]) -> None:
    await reduce_in(groups_of(pair, "g"))
    for worker in pair:
        history = history_of(worker.parts)
        (group,) = history.groups
        assert (group.label, group.members) == ("group 'g' of 2", ("a", "b"))
        assert group.begun == 2
        opened, reduced = history.collectives
        assert (opened.number, opened.operation) == (0, "open")
        assert (reduced.number, reduced.operation) == (1, "all_reduce")
        assert (reduced.dtype, reduced.shape) == ("torch.float32", (2, 3))
        assert reduced.outcome == "ok"
        assert 0 < reduced.began_ns <= reduced.ended_ns
        assert reduced.frames == ()
    history, other = (history_of(worker.parts) for worker in pair)
    assert history.groups == other.groups


async def test_running_collective_shows_its_frames(pair: tuple[Worker, Worker]) -> None:
    first, second = groups_of(pair)

    async def train() -> None:
        await first.barrier()

    task = asyncio.create_task(train())
    await asyncio.sleep(0)
    opened, waiting = history_of(pair[0].parts).collectives
    assert opened.ended_ns == waiting.ended_ns == UNDER_WAY
    assert opened.outcome == waiting.outcome == ""
    assert (waiting.number, waiting.operation) == (1, "barrier")
    assert [frame.function.rpartition(".")[2] for frame in waiting.frames] == ["train"]
    await asyncio.gather(task, second.barrier())


async def test_closed_group_and_its_successor_are_both_listed(
    pair: tuple[Worker, Worker],
) -> None:
    for _ in range(2):
        groups = groups_of(pair)
        await reduce_in(groups)
        for group in groups:
            group.close()
    history = history_of(pair[0].parts)
    assert [group.begun for group in history.groups] == [CLOSED, CLOSED]
    assert len({group.group_id for group in history.groups}) == 2
    assert [
        (collective.group, collective.number) for collective in history.collectives
    ] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]


async def test_failed_collective_is_in_the_history_of_both_ranks(
    pair: tuple[Worker, Worker],
) -> None:
    first, second = groups_of(pair)
    await reduce_in([first, second])
    task = asyncio.create_task(first.all_reduce(torch.ones(1)))
    await asyncio.sleep(0)
    task.cancel()  # which fails it for all
    with pytest.raises(asyncio.CancelledError):
        await task
    await pair[0].peer("b").call(int)  # so the word of it is there
    with pytest.raises(CollectiveError):
        await second.all_reduce(torch.ones(1))
    for worker in pair:
        last = history_of(worker.parts).collectives[-1]
        assert (last.number, last.operation) == (2, "all_reduce")
        assert last.outcome == "CollectiveError"


async def test_history_is_limited(pair: tuple[Worker, Worker]) -> None:
    groups = groups_of(pair)
    for _ in range(3):
        await reduce_in(groups)
    history = history_of(pair[0].parts, ended_max=2)
    assert [collective.number for collective in history.collectives] == [2, 3]
    assert not history.is_whole
    event = pair[0].parts.recorder.collectives.recent[-1]
    for _ in range(RECENT_MAX):
        pair[0].parts.recorder.collectives.record(tuple(event))
    assert not history_of(pair[0].parts).is_whole
