"""What a worker tells of its collectives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import torch

from asyncrpc import Group, Worker
from asyncrpc.errors import CollectiveError
from asyncrpc.testing import Cluster
from asyncrpc.tools.inspection.collective_records import CLOSED, UNDER_WAY
from asyncrpc.tools.inspection.histories import history_of
from asyncrpc.trace import RECENT_MAX


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


async def test_ended_collectives_are_in_the_history(
    pair: tuple[Worker, Worker],
) -> None:
    groups = groups_of(pair, "g")
    await reduce_in(groups)
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
