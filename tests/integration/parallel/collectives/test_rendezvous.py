"""Rendezvous of real workers: payloads in order, subsets apart, failures for all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import pytest

import asyncrpc
from asyncrpc import Options, UsageError, Worker, WorkerLostError, collectives
from asyncrpc.core.membership.rendezvous import StaticRendezvous
from asyncrpc.errors import (
    BarrierBrokenError,
    BarrierTimeoutError,
    NotStartedError,
    UnknownWorkerError,
)
from asyncrpc.parallel.collectives.payload_exchange import (
    ALL_BYTES_MAX,
    PAYLOAD_BYTES_MAX,
    RendezvousService,
    payload_bytes_max,
)
from asyncrpc.testing import Cluster, ProcessCluster
from tests import raw_messages
from tests.inner_state import series_of
from tests.integration.core.groups import until

MIB = 1 << 20
GIVES_UP_S = 2.0  # in which they have learned from each other, also on a busy machine
Outcomes = list[list[bytes] | BaseException]
Members = Sequence[str | int] | None


@pytest.fixture
async def five() -> AsyncIterator[list[Worker]]:
    async with Cluster(5, options=Options(drain_timeout_s=2.0)) as workers:
        yield workers


async def outcomes(*calls: Awaitable[list[bytes]]) -> Outcomes:
    async with asyncio.timeout(60.0):
        return await asyncio.gather(*calls, return_exceptions=True)


async def all_meet(
    workers: Sequence[Worker], tag: str, members: Members = None
) -> Outcomes:
    calls = (
        collectives.rendezvous(worker, tag, worker.name.encode(), members)
        for worker in workers
    )
    return await outcomes(*calls)


async def until_all_have_heard(workers: Sequence[Worker], tag: str) -> None:
    """Wait until each has come to a round of the tag, or was told of it."""

    def has_heard(worker: Worker) -> bool:
        known = series_of(worker.parts.barriers.table)
        return any(series.key.tag == tag for series in known)

    await until(lambda: all(map(has_heard, workers)))


async def settled(workers: Sequence[Worker], tag: str) -> None:
    """See that the next rendezvous works."""
    names = [worker.name.encode() for worker in workers]
    assert await all_meet(workers, tag) == [names] * len(workers)


# --- what it brings ------------------------------------------------------------------


async def test_payloads_come_in_the_order_of_the_members(five: list[Worker]) -> None:
    for _ in range(2):
        await settled(five, "tag")
    order = [4, 1, 3]
    payloads = await all_meet([five[rank] for rank in order], "tag", order)
    assert payloads == [[b"e", b"b", b"d"]] * 3
    assert await collectives.rendezvous(five[2], "tag", b"alone", [2]) == [b"alone"]
    *others, last = five
    by_name = collectives.rendezvous(last, "tag", b"x", list("abcde"))
    payloads = await outcomes(
        *(collectives.rendezvous(other, "tag", b"x") for other in others), by_name
    )
    assert payloads == [[b"x"] * 5] * 5


async def test_late_member_gets_all_payloads(five: list[Worker]) -> None:
    """The late member was not connected to another worker before."""
    *others, late = five
    coming = asyncio.create_task(all_meet(others, "tag"))
    await until_all_have_heard(five, "tag")
    assert len(await collectives.rendezvous(late, "tag", b"late")) == 5
    assert (await coming)[0] == [b"a", b"b", b"c", b"d", b"late"]


async def test_tags_and_subsets_may_meet_at_once(five: list[Worker]) -> None:
    """Calls of one worker with the same tag and members take turns."""
    subsets: list[list[int] | None] = [None, [0, 1], [1, 0, 2], [4, 3], [2, 4, 0, 1]]
    calls, expected = [], []
    for number in range(20):
        members = subsets[number % len(subsets)]
        ranks = range(5) if members is None else members
        for rank in ranks:
            for turn in range(2):
                payload = f"{number} {turn} {rank}".encode()
                calls.append(
                    collectives.rendezvous(five[rank], f"{number}", payload, members)
                )
                expected.append([f"{number} {turn} {rank}".encode() for rank in ranks])
    assert await outcomes(*calls) == expected


async def test_payloads_up_to_1_mib_arrive(five: list[Worker]) -> None:
    sizes = [MIB, 0, 256 << 10, 16 << 10, 1]
    payloads = [bytes([rank]) * size for rank, size in enumerate(sizes)]
    calls = (
        collectives.rendezvous(worker, "tag", payload)
        for worker, payload in zip(five, payloads, strict=True)
    )
    assert await outcomes(*calls) == [payloads] * 5


@pytest.mark.parametrize("size", [2, 3, 5, 8])
async def test_worker_may_leave_right_after_a_rendezvous(size: int) -> None:
    names = [b"%c" % (97 + rank) for rank in range(size)]

    async def pass_and_leave(worker: Worker) -> None:
        assert (
            await collectives.rendezvous(worker, "tag", worker.name.encode()) == names
        )
        await worker.shutdown(drain_timeout_s=0.0)

    for _ in range(5):
        async with Cluster(size) as workers, asyncio.TaskGroup() as leaving:
            for worker in workers:
                leaving.create_task(pass_and_leave(worker))


# --- what a program does wrong -------------------------------------------------------


@pytest.mark.parametrize(
    ("members", "error", "problem"),
    [
        ([1, 2], UsageError, r"worker 'a' \(rank 0\) is not among the members"),
        ([], UsageError, "is not among the members"),
        (list(range(1, 5)) * 3, UsageError, "rank 1 is among the members more than"),
        ([0, 1, "a"], UsageError, "rank 0 is among the members more than once"),
        ([0, 5], UsageError, "name or rank of a worker of a group of 5, not 5"),
        ([0, -1], UsageError, "name or rank of .*, not -1"),
        ([0, True], UsageError, "name or rank of .*, not True"),
        ([0, "x"], UnknownWorkerError, "'x'"),
        ("ab", UsageError, "members must be a list"),
    ],
)
async def test_invalid_members_are_refused(
    members: Any, error: type[Exception], problem: str
) -> None:
    async with Cluster(5) as workers:
        with pytest.raises(error, match=problem):
            await collectives.rendezvous(workers[0], "tag", b"", members)
        await settled(workers, "tag")


async def test_wrong_arguments_fail_their_own_call_only() -> None:
    async with Cluster(5) as workers:
        *others, last = workers
        coming = asyncio.create_task(all_meet(others, "tag"))
        for tag in (7, b"tag", "x" * 1025):
            with pytest.raises(UsageError, match="tag must be"):
                await collectives.rendezvous(last, tag)  # type: ignore[arg-type]
        for payload in ("text", bytearray(1), None):
            with pytest.raises(UsageError, match="payload must be bytes"):
                await collectives.rendezvous(last, "tag", payload)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=r"1,048,577 bytes; .* have 1,048,576"):
            await collectives.rendezvous(last, "tag", bytes(MIB + 1))
        payloads = await collectives.rendezvous(last, "tag", b"e")
        assert await coming == [payloads] * 4
        await settled(workers, "tag")


def test_payload_limit_shrinks_with_the_number_of_ranks() -> None:
    assert payload_bytes_max(1) == payload_bytes_max(16) == PAYLOAD_BYTES_MAX
    assert payload_bytes_max(4096) == ALL_BYTES_MAX // 4096 == 4096


async def test_a_rendezvous_needs_ranks_and_a_running_worker() -> None:
    async with Worker("a", rendezvous=StaticRendezvous({"a": "mem://a"})) as worker:
        with pytest.raises(UsageError, match="a rendezvous needs ranks"):
            await collectives.rendezvous(worker, "tag")
    with pytest.raises(NotStartedError):
        await collectives.rendezvous(worker, "tag")


@pytest.mark.parametrize("wrong", [[0, 1], [4, 0], [4, 3, 2, 1, 0]])
async def test_different_members_for_a_tag_fail_on_all_ranks(
    five: list[Worker], wrong: list[int]
) -> None:
    erring = five[wrong[0]]
    calls = (
        collectives.rendezvous(worker, "tag", b"", wrong if worker is erring else None)
        for worker in five
    )
    for error in await outcomes(*calls):
        assert isinstance(error, BarrierBrokenError)
        assert f"rank {erring.rank} ('{erring.name}')" in str(error)
        assert "all 5 ranks" in str(error)
        assert str(wrong) in str(error)
        assert erring.name in error.missing
    await settled(five, "tag")


# --- what goes wrong -----------------------------------------------------------------


async def test_timeout_fails_on_all_ranks_and_names_the_missing(
    five: list[Worker],
) -> None:
    a, *others = five
    calls = (
        collectives.rendezvous(
            worker, "tag", timeout_s=GIVES_UP_S if worker is five[4] else None
        )
        for worker in others
    )
    *errors, error = await outcomes(*calls)
    assert isinstance(error, BarrierTimeoutError)
    assert isinstance(error, TimeoutError)
    assert (error.number, error.missing) == (0, ("a",))
    absence = "within 2 s these members did not come: rank 0 ('a')"
    assert f"rendezvous 0 of 'tag': {absence}" in str(error)
    for error in errors:
        assert type(error) is BarrierBrokenError
        assert "rank 4 ('e') gave up rendezvous 0 of 'tag': it waited 2 s" in str(error)
        assert error.missing == ("a",)
    with pytest.raises(BarrierBrokenError, match=r"rank 4 \('e'\) gave up"):
        await collectives.rendezvous(a, "tag")
    await settled(five, "tag")


async def test_cancelled_member_fails_its_tag_on_all_ranks(five: list[Worker]) -> None:
    *others, last, late = five
    good = asyncio.create_task(all_meet(five[:4], "good"))
    coming = asyncio.create_task(all_meet(others, "tag"))
    cancelled = asyncio.create_task(collectives.rendezvous(last, "tag"))
    await until_all_have_heard(five, "tag")
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    text = "rank 3 ('d') gave up rendezvous 0 of 'tag': it was cancelled"
    for error in await coming:
        assert isinstance(error, BarrierBrokenError)
        assert text in str(error)
    with pytest.raises(BarrierBrokenError, match="rank 3"):
        await collectives.rendezvous(late, "tag")
    await settled(five, "tag")
    assert not good.done()
    assert await collectives.rendezvous(five[4], "good", b"e") == (await good)[0]


async def test_call_cancelled_before_its_turn_does_not_count() -> None:
    async with Cluster(2) as (a, b):
        first = asyncio.create_task(collectives.rendezvous(a, "tag", b"1"))
        second = asyncio.create_task(collectives.rendezvous(a, "tag", b"2"))
        third = asyncio.create_task(collectives.rendezvous(a, "tag", b"3"))
        await asyncio.sleep(0)
        with pytest.raises(BarrierTimeoutError, match="an earlier call of this worker"):
            await collectives.rendezvous(a, "tag", timeout_s=0.0)
        second.cancel()
        assert (
            await collectives.rendezvous(b, "tag", b"x") == await first == [b"1", b"x"]
        )
        assert (
            await collectives.rendezvous(b, "tag", b"y") == await third == [b"3", b"y"]
        )


async def test_member_that_shuts_down_fails_the_rendezvous(five: list[Worker]) -> None:
    *others, last = five
    coming = asyncio.create_task(all_meet(others, "tag"))
    waiting = [
        asyncio.create_task(outcomes(collectives.rendezvous(last, "own", b"", [4, 0])))
        for _ in range(2)
    ]
    await until_all_have_heard(five, "tag")
    await until_all_have_heard([last, five[0]], "own")
    await last.shutdown()
    for error in await coming:
        assert isinstance(error, WorkerLostError)
        assert error.to == "e"
        assert "rank 4 ('e') is gone" in str(error)
    [[first], [second]] = await asyncio.gather(*waiting)
    assert isinstance(first, BarrierBrokenError)
    assert "rank 4 ('e') gave up rendezvous 0 of 'own': it shuts down" in str(first)
    assert isinstance(second, NotStartedError)
    with pytest.raises(WorkerLostError, match=r"rank 4 \('e'\) is gone"):
        await asyncio.wait_for(collectives.rendezvous(others[3], "another"), 30.0)
    payloads = await all_meet(others, "tag", [3, 2, 1, 0])
    assert payloads == [[b"d", b"c", b"b", b"a"]] * 4


async def meet_there(tag: str, members: list[int] | None) -> list[bytes]:
    worker = asyncrpc.current_worker()
    return await collectives.rendezvous(worker, tag, worker.name.encode(), members)


async def until_here(tag: str) -> None:
    worker: Any = asyncrpc.current_worker()
    await until_all_have_heard([worker], tag)


@pytest.mark.parametrize("victim", ["b", "d"])
async def test_killed_member_fails_the_rendezvous(victim: str) -> None:
    """The victim is in the middle of the tree, or a leaf of it."""
    names = ["b", "c", "d"]
    cluster = ProcessCluster(names, method="forkserver")
    async with cluster as worker:
        living = [name for name in names if name != victim]
        calls = [
            worker.parts.start_call(name, meet_there, ("tag", None)) for name in living
        ]
        own = asyncio.create_task(collectives.rendezvous(worker, "tag", b"a"))
        for name in living:
            await worker.peer(name).call(until_here, "tag")
        assert not own.done()
        cluster.kill(victim)
        for error in await outcomes(own, *calls):
            assert isinstance(error, WorkerLostError)
            assert f"('{victim}') is gone" in str(error)
        left = [rank for rank, name in enumerate("abcd") if name != victim]
        calls = [
            worker.parts.start_call(name, meet_there, ("tag", left)) for name in living
        ]
        expected = [name.encode() for name in "abcd" if name != victim]
        results = await outcomes(
            collectives.rendezvous(worker, "tag", b"a", left), *calls
        )
        assert results == [expected] * 3


# --- once all have come --------------------------------------------------------------


@pytest.fixture
def release_payloads(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Hold up the exchange of payloads at each parent; return what lets it go on."""
    gate, collect = asyncio.Event(), vars(RendezvousService)["_collect"]

    async def collect_later(*args: Any) -> Any:
        await gate.wait()
        return await collect(*args)

    monkeypatch.setattr(RendezvousService, "_collect", collect_later)
    return gate.set


def has_passed(worker: Worker) -> bool:
    return any(series.passed >= 0 for series in series_of(worker.parts.barriers.table))


async def test_call_cancelled_after_all_arrived_fails_no_other(
    release_payloads: Callable[[], None],
) -> None:
    async with Cluster(5) as workers:
        a, b, *others = workers
        calls = [asyncio.create_task(all_meet([worker], "tag")) for worker in others]
        cancelled = [
            asyncio.create_task(collectives.rendezvous(worker, "tag"))
            for worker in (a, b)
        ]
        await until(lambda: all(map(has_passed, workers)))
        for call in cancelled:
            call.cancel()
        release_payloads()
        expected = [b"", b"", b"c", b"d", b"e"]
        assert await asyncio.gather(*calls) == [[expected]] * 3
        assert all(
            isinstance(result, asyncio.CancelledError)
            for result in await outcomes(*cancelled)
        )
        await settled(workers, "tag")


async def test_timeout_after_all_arrived_fails_its_caller_alone(
    release_payloads: Callable[[], None],
) -> None:
    async with Cluster(3) as (a, b, c):
        calls = [
            asyncio.create_task(collectives.rendezvous(worker, "tag"))
            for worker in (a, b)
        ]
        with pytest.raises(BarrierTimeoutError, match="their payloads did not arrive"):
            await collectives.rendezvous(c, "tag", timeout_s=GIVES_UP_S)
        release_payloads()
        assert await outcomes(*calls) == [[b""] * 3] * 2
        await settled((a, b, c), "tag")


@pytest.mark.parametrize("lost", [0, 2])
async def test_member_lost_after_all_arrived_fails_the_others(
    lost: int, release_payloads: Callable[[], None]
) -> None:
    """The root, which the others wait for, or one that the root waits for."""
    async with Cluster(3) as workers:
        calls = [
            asyncio.create_task(collectives.rendezvous(worker, "tag"))
            for worker in workers
        ]
        await until(lambda: all(map(has_passed, workers)))
        await workers[lost].shutdown(drain_timeout_s=0.0)
        release_payloads()
        errors = await outcomes(*calls)
        del errors[lost]
        for error in errors:
            assert isinstance(error, BarrierBrokenError)
            assert f"rank {lost} ('{workers[lost].name}') is gone" in str(error)


@pytest.mark.parametrize(
    ("method", "value"),
    [
        ("collect", ["tag", None]),
        ("collect", ["tag", [0, 9], 0]),
        ("collect", ["tag", None, 0]),  # by a child
        ("share", ["tag", None, 0, [b"", b"", b""], ""]),
        ("share", ["tag", None, 0, [7], ""]),
    ],
)
async def test_request_from_a_non_parent_is_refused(method: str, value: Any) -> None:
    async with Cluster(3) as (a, b, c):
        link = await b.parts.link_to("a")
        with pytest.raises(asyncrpc.AsyncRpcError, match=f"rendezvous.{method}"):
            await raw_messages.request(link, "rendezvous", method, value)
        await settled((a, b, c), "tag")


async def test_shared_payloads_must_have_one_per_rank(
    release_payloads: Callable[[], None],
) -> None:
    async with Cluster(3) as workers:
        a = workers[0]
        calls = asyncio.create_task(all_meet(workers, "tag"))
        await until(lambda: all(map(has_passed, workers)))
        link = await a.parts.link_to("b")
        value = ["tag", None, 0, [b""], ""]
        with pytest.raises(asyncrpc.AsyncRpcError, match="there must be 3 payloads"):
            await raw_messages.request(link, "rendezvous", "share", value)
        early = ["tag", None, 7, [b""] * 3, ""]
        assert await raw_messages.request(link, "rendezvous", "share", early) is None
        release_payloads()
        assert await calls == [[b"a", b"b", b"c"]] * 3
