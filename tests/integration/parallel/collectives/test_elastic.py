"""Elastic groups: members come, leave and die, and the others agree on who is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any

import pytest
import torch

import asyncrpc
from asyncrpc import LimitOptions, Options, UsageError, Worker, join_group
from asyncrpc.collectives import ElasticGroup
from asyncrpc.errors import (
    CollectiveTimeoutError,
    GroupChangedError,
    QuorumLostError,
    RankLostError,
)
from asyncrpc.testing import Cluster, ProcessCluster, acting_as

OPTIONS = Options(drain_timeout_s=0.5)
LIMIT_S = 60.0  # which only a hang takes
NAMES = ("a", "b", "c", "d")


@pytest.fixture
async def workers() -> AsyncIterator[list[Worker]]:
    async with Cluster(4, options=OPTIONS) as cluster:
        yield list(cluster)


async def join(
    workers: Sequence[Worker], min_size: int | None = None
) -> list[ElasticGroup]:
    size = len(workers) if min_size is None else min_size
    return await all_of(
        join_group(worker, "training", min_size=size, timeout_s=LIMIT_S)
        for worker in workers
    )


async def all_of(coroutines: Any) -> list[Any]:
    async with asyncio.timeout(LIMIT_S):
        return list(await asyncio.gather(*coroutines))


async def outcomes(coroutines: Any) -> list[Any]:
    async with asyncio.timeout(LIMIT_S):
        return list(await asyncio.gather(*coroutines, return_exceptions=True))


async def works(groups: Sequence[ElasticGroup]) -> None:
    """They agree on everything, and can reduce."""
    first = groups[0]
    assert [group.current.rank for group in groups] == list(range(first.current.size))
    assert {
        (group.current.members, group.generation, group.steps) for group in groups
    } == {(first.current.members, first.generation, first.steps)}
    sums = await all_of(group.current.all_reduce(torch.ones(3)) for group in groups)
    assert all((total == first.current.size).all() for total in sums)


async def renewed(groups: Sequence[ElasticGroup], **options: Any) -> None:
    """All of them come to a border."""
    await all_of(group.reconfigure(**options) for group in groups)


async def test_the_first_members_are_ordered_by_rank(workers: list[Worker]) -> None:
    groups = await join(workers)
    assert groups[0].current.members == NAMES
    assert groups[0].generation == 1
    await works(groups)


async def test_newcomer_waits_for_the_next_reconfiguration(
    workers: list[Worker],
) -> None:
    groups = await join(workers[:3])
    late = asyncio.create_task(join(workers[3:], 1))
    while not all(group.has_changed for group in groups):  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert groups[0].newcomers == ("d",)
    await works(groups)  # it does not disturb the present generation
    assert not late.done()
    await renewed(groups, step=5)
    groups += await late
    assert groups[0].current.members == NAMES
    assert groups[3].steps == (5, 5, 5, -1)
    assert groups[3].source == 0
    assert not groups[0].has_changed
    await works(groups)


async def test_closed_group_is_not_waited_for(workers: list[Worker]) -> None:
    groups = await join(workers)
    groups[0].close()
    groups[0].close()
    results = await outcomes(
        group.current.all_reduce(torch.ones(1)) for group in groups[1:]
    )
    assert all(isinstance(result, GroupChangedError) for result in results)
    assert all("'a') has left group 'training'" in str(result) for result in results)
    rest = groups[1:]
    await renewed(rest)
    assert rest[0].current.members == NAMES[1:]
    await works(rest)
    # It may come again, and is then a newcomer.
    again = asyncio.create_task(join(workers[:1], 1))
    while not rest[2].has_changed:  # noqa: ASYNC110
        await asyncio.sleep(0)
    await renewed(rest)
    rest += await again
    assert list(rest[0].current.members) == ["b", "c", "d", "a"]
    await works(rest)


async def test_reconfiguration_fails_waiting_collectives_by_name(
    workers: list[Worker],
) -> None:
    """Groups made of the members fail, too."""
    groups = await join(workers)
    part = [group.current.duplicate() for group in groups]
    await all_of(group.barrier() for group in part)
    waiting = [asyncio.create_task(group.barrier()) for group in part[1:]]
    waiting += [asyncio.create_task(group.current.barrier()) for group in groups[1:]]
    await asyncio.sleep(0)
    first = asyncio.create_task(groups[0].reconfigure())
    for error in await outcomes(waiting):
        assert isinstance(error, GroupChangedError)
        assert "rank 0 ('a') reconfigures group 'training" in str(error)
        assert error.ranks == ("a",)
    await all_of([first, *(group.reconfigure() for group in groups[1:])])
    await works(groups)


async def test_a_group_is_reconfigured_once_at_a_time(workers: list[Worker]) -> None:
    groups = await join(workers[:2])
    first = asyncio.create_task(groups[0].reconfigure())
    await asyncio.sleep(0)
    with pytest.raises(UsageError, match="once at a time"):
        await groups[0].reconfigure()
    with pytest.raises(UsageError, match="already in group 'training'"):
        await join_group(workers[0], "training")
    await all_of([first, groups[1].reconfigure()])
    await works(groups)
    groups[0].close()
    with pytest.raises(UsageError, match="is closed"):
        await groups[0].reconfigure()


async def test_late_member_is_named_and_reconfigure_may_be_repeated(
    workers: list[Worker],
) -> None:
    groups = await join(workers[:3])
    errors = await outcomes(group.reconfigure(timeout_s=0.05) for group in groups[:2])
    for error in errors:
        assert isinstance(error, CollectiveTimeoutError)
        assert "c" in error.ranks
        assert "did not come" in str(error)
    await renewed(groups)
    assert groups[0].generation == 2
    await works(groups)


async def test_a_call_that_was_cancelled_may_be_repeated(workers: list[Worker]) -> None:
    groups = await join(workers[:2])
    first = asyncio.create_task(groups[0].reconfigure())
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    second = asyncio.create_task(groups[1].reconfigure())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not second.done()  # the first does not count as there
    await all_of([groups[0].reconfigure(), second])
    await works(groups)


async def test_a_newcomer_that_gives_up_is_not_waited_for(
    workers: list[Worker],
) -> None:
    groups = await join(workers[:2])
    late = asyncio.create_task(join_group(workers[2], "training"))
    while not groups[0].has_changed:  # noqa: ASYNC110
        await asyncio.sleep(0)
    late.cancel()
    await outcomes([late])
    while groups[0].has_changed:  # noqa: ASYNC110
        await asyncio.sleep(0)
    await renewed(groups)
    assert groups[0].current.members == ("a", "b")
    await works(groups)


async def test_group_below_its_minimum_does_not_begin(workers: list[Worker]) -> None:
    coroutines = [
        join_group(worker, "training", min_size=5, timeout_s=0.1) for worker in workers
    ]
    for error in await outcomes(coroutines):
        assert isinstance(error, QuorumLostError | CollectiveTimeoutError)
    assert "of at least 5 workers came" in str(
        (await outcomes([join_group(workers[0], "x", min_size=5, timeout_s=0.1)]))[0]
    )


async def test_wrong_arguments_are_refused(workers: list[Worker]) -> None:
    (group,) = await join(workers[:1])
    with pytest.raises(UsageError, match="step must be"):
        await group.reconfigure(step=-2)
    with pytest.raises(UsageError, match="min_size must be"):
        await group.reconfigure(min_size=0)
    with pytest.raises(UsageError, match="quorum must be 'majority' or 'any'"):
        await group.reconfigure(quorum="all")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="name must be"):
        await join_group(workers[0], "")
    await group.reconfigure()
    await works([group])


# --- real processes ------------------------------------------------------------------

kept: dict[str, ElasticGroup] = {}  # of a process, between two calls


async def enter(min_size: int) -> tuple[str, ...]:
    worker = asyncrpc.current_worker()
    group = await join_group(worker, "training", min_size=min_size, timeout_s=LIMIT_S)
    kept["group"] = group
    return group.current.members


async def reduce() -> str:
    """Wait in a collective until it fails; return the error."""
    try:
        await kept["group"].current.all_reduce(torch.ones(100_000))
    except (RankLostError, GroupChangedError) as error:
        return str(error)
    return "it went well"


async def renew(step: int, quorum: Any = "majority") -> Any:
    """Come to a border."""
    try:
        group = kept["group"]
        await group.reconfigure(step=step, quorum=quorum, timeout_s=LIMIT_S)
    except QuorumLostError as error:
        return str(error)
    total = await group.current.all_reduce(torch.ones(1))
    return group.current.members, group.generation, group.steps, total.item()


async def on_all(worker: Worker, names: Sequence[str], call: Any, *args: Any) -> Any:
    """Run a function on this worker and others, at the same time."""
    with acting_as(worker):
        calls: list[Awaitable[Any]] = [call(*args)]
        calls += [worker.peer(name).call(call, *args) for name in names]
        return await all_of(calls)


@pytest.mark.parametrize("memory", ["shared", "not shared"])
async def test_survivors_name_killed_members_and_reconfigure(memory: str) -> None:
    """While others wait for them, and while all reconfigure."""
    plain = Options(drain_timeout_s=0.5, limits=LimitOptions(shared_memory_bytes=0))
    options = OPTIONS if memory == "shared" else plain
    cluster = ProcessCluster(["b", "c", "d"], options=options, method="forkserver")
    async with cluster as worker:
        changes = worker.members_changed()
        await on_all(worker, "bcd", enter, 4)
        cluster.kill("c")
        for text in await on_all(worker, "bd", reduce):
            assert "'c'" in text
        change = await anext(changes)
        assert (change.kind.value, change.member.name) == ("lost", "c")
        for view in await on_all(worker, "bd", renew, 7):
            assert view == (("a", "b", "d"), 2, (7, 7, 7), 3.0)
        with acting_as(worker):
            here = asyncio.create_task(renew(8))
            there = worker.peer("b").call(renew, 8)
            cluster.kill("d")  # it never comes
            for view in await all_of([here, there]):
                assert view == (("a", "b"), 3, (8, 8), 2.0)
            cluster.kill("b")
            assert "'b'" in await reduce()
            # Half of two, with rank 0.
            assert await renew(9) == (("a",), 4, (9,), 1.0)
    kept.clear()


async def test_minority_does_not_continue_alone() -> None:
    cluster = ProcessCluster(["b", "c"], options=OPTIONS, method="forkserver")
    async with cluster as worker:
        await on_all(worker, "bc", enter, 3)
        cluster.kill("b")
        cluster.kill("c")
        with acting_as(worker):
            assert "'" in await reduce()
            text = await renew(1)
            assert "lost 'b', 'c'" in text
            assert "not a majority" in text
            assert 'quorum="any"' in text
            assert await renew(1, "any") == (("a",), 2, (1,), 1.0)
    kept.clear()
