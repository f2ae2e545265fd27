"""Rendezvous of real workers: payloads in order, subsets apart, failures for all."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any

import pytest

import asyncrpc
from asyncrpc import Options, UsageError, Worker, WorkerLostError
from asyncrpc.errors import BarrierBrokenError, BarrierTimeoutError, NotStartedError
from asyncrpc.runtime.membership.rendezvous import StaticRendezvous
from asyncrpc.runtime.rounds import service, turns
from asyncrpc.runtime.rounds.machine import table
from asyncrpc.runtime.rounds.messages import PART_BYTES
from asyncrpc.runtime.worker import Worker as PlainWorker
from asyncrpc.testing import Cluster, ProcessCluster
from asyncrpc.testing.cluster import Wires
from tests import raw_messages
from tests.inner_state import series_of
from tests.integration.runtime.groups import until

MIB = 1 << 20
GIVES_UP_S = 2.0  # in which they have learned from each other, also on a busy machine
Outcomes = list[list[bytes] | BaseException]


@pytest.fixture
async def five(wires: Wires) -> AsyncIterator[list[Worker]]:
    """Five workers on each transport in turn."""
    options = Options(drain_timeout_s=2.0)
    async with Cluster(5, network=wires, options=options) as workers:
        yield workers


async def outcomes(*calls: Awaitable[list[bytes]]) -> Outcomes:
    async with asyncio.timeout(60.0):
        return await asyncio.gather(*calls, return_exceptions=True)


async def all_meet(
    workers: Sequence[Worker], tag: str, replicas: Sequence[int] | None = None
) -> Outcomes:
    return await outcomes(
        *(one.rendezvous(tag, one.name.encode(), replicas) for one in workers)
    )


def has_heard(worker: PlainWorker, tag: str) -> bool:
    """Return whether a worker has come to a round of the tag, or was asked for it."""
    return any(one.key.tag == tag for one in series_of(worker.parts.rounds.machine))


async def until_all_have_heard(workers: Sequence[PlainWorker], tag: str) -> None:
    """Wait until members that are silent have been asked why."""
    await until(lambda: all(has_heard(one, tag) for one in workers))


async def settled(workers: Sequence[Worker], tag: str) -> None:
    """See that the next rendezvous works."""
    names = [worker.name.encode() for worker in workers]
    assert await all_meet(workers, tag) == [names] * len(workers)


# --- what it brings ------------------------------------------------------------------


async def test_payloads_come_in_the_order_of_the_ranks(five: list[Worker]) -> None:
    for _ in range(3):
        assert await all_meet(five, "tag") == [[b"a", b"b", b"c", b"d", b"e"]] * 5


async def test_of_some_they_come_in_the_order_of_the_call(five: list[Worker]) -> None:
    order = [4, 1, 3]
    found = await all_meet([five[rank] for rank in order], "tag", order)
    assert found == [[b"e", b"b", b"d"]] * 3
    assert await five[2].rendezvous("tag", b"alone", [2]) == [b"alone"]


async def test_all_ranks_are_all_of_the_group(five: list[Worker]) -> None:
    *others, last = five
    found = await outcomes(
        *(worker.rendezvous("tag", b"x") for worker in others),
        last.rendezvous("tag", b"x", range(5)),
    )
    assert found == [[b"x"] * 5] * 5


async def test_a_member_that_is_late_has_missed_nothing(five: list[Worker]) -> None:
    """It had not been connected to anybody, nor made any call, when it was told."""
    *others, late = five
    coming = asyncio.create_task(all_meet(others, "tag"))
    await until_all_have_heard(five, "tag")
    assert len(await late.rendezvous("tag", b"late")) == 5
    assert (await coming)[0] == [b"a", b"b", b"c", b"d", b"late"]


async def test_many_tags_and_subsets_at_once(five: list[Worker]) -> None:
    subsets: list[list[int] | None] = [None, [0, 1], [1, 0, 2], [4, 3], [2, 4, 0, 1]]
    calls, expected = [], []
    for number in range(20):
        replicas = subsets[number % len(subsets)]
        for rank in range(5) if replicas is None else replicas:
            payload = f"{number} {rank}".encode()
            calls.append(five[rank].rendezvous(f"tag {number}", payload, replicas))
            ranks = range(5) if replicas is None else replicas
            expected.append([f"{number} {one}".encode() for one in ranks])
    assert await outcomes(*calls) == expected


async def test_calls_of_one_worker_take_turns(five: list[Worker]) -> None:
    calls = [
        worker.rendezvous("tag", str(number).encode())
        for worker in five
        for number in range(4)
    ]
    expected = [[str(number).encode()] * 5 for number in range(4)] * 5
    assert await outcomes(*calls) == expected


async def test_long_payloads(five: list[Worker]) -> None:
    sizes = [MIB, 0, PART_BYTES, PART_BYTES - 5, 1]
    payloads = [bytes([rank]) * size for rank, size in enumerate(sizes)]
    calls = (
        one.rendezvous("tag", payload)
        for one, payload in zip(five, payloads, strict=True)
    )
    assert await outcomes(*calls) == [payloads] * 5


async def test_nobody_is_connected_to_all() -> None:
    names = [f"w{number}" for number in range(12)]
    async with Cluster(names=names) as workers:
        await settled(workers, "tag")
        assert max(len(worker.parts.directory.links) for worker in workers) <= 3


# --- what a program does wrong -------------------------------------------------------


@pytest.mark.parametrize(
    ("replicas", "problem"),
    [
        ([1, 2], r"worker 'a' \(rank 0\) is not among the replicas"),
        ([], "is not among the replicas"),
        (list(range(1, 5)) * 3, "rank 1 is among the replicas more than once"),
        ([0, 1, 0], "rank 0 is among the replicas more than once"),
        ([0, 5], "a rank of a group of 5 workers, not 5"),
        ([0, -1], "a rank of .*, not -1"),
        ([0, "b"], "a rank of .*, not 'b'"),
        ([0, True], "a rank of .*, not True"),
    ],
)
async def test_wrong_replicas_are_refused(replicas: Any, problem: str) -> None:
    async with Cluster(5) as workers:
        with pytest.raises(UsageError, match=problem):
            await workers[0].rendezvous("tag", b"", replicas)
        await settled(workers, "tag")


async def test_a_tag_is_a_short_text() -> None:
    async with Cluster(1) as (a,):
        for tag in (7, b"tag", "x" * 1025):
            with pytest.raises(UsageError, match="tag must be"):
                await a.rendezvous(tag)  # type: ignore[arg-type]


async def test_without_ranks_there_is_none() -> None:
    async with Worker("a", rendezvous=StaticRendezvous({"a": "mem://a"})) as worker:
        with pytest.raises(UsageError, match="a rendezvous needs ranks"):
            await worker.rendezvous("tag")
    with pytest.raises(NotStartedError):
        await worker.rendezvous("tag")


@pytest.mark.parametrize("payload", ["text", bytearray(1), None])
async def test_a_payload_that_is_no_bytes_costs_that_call_only(payload: Any) -> None:
    async with Cluster(5) as workers:
        *others, last = workers
        coming = asyncio.create_task(all_meet(others, "tag"))
        with pytest.raises(UsageError, match="payload must be bytes"):
            await last.rendezvous("tag", payload)
        found = await last.rendezvous("tag", b"e")
        assert await coming == [found] * 4
        await settled(workers, "tag")


async def test_a_payload_that_is_too_long_fails_for_all() -> None:
    payload = bytes(MIB + 1)
    problem = "has 1,048,577 bytes; the limit in a rendezvous of 5 members is 1,04"
    async with Cluster(5) as workers:
        *others, last = workers
        coming = asyncio.create_task(all_meet(others, "tag"))
        with pytest.raises(UsageError, match=problem):
            await last.rendezvous("tag", payload)
        for error in await coming:
            assert isinstance(error, BarrierBrokenError)
            assert "rank 4 ('e') gave up a rendezvous of 'tag'" in str(error)
            assert re.search(problem, str(error))
        await settled(workers, "tag")


async def test_of_many_members_each_may_have_less() -> None:
    members = 24
    most = 16 * MIB // members
    async with Cluster(members) as workers:
        found = await outcomes(*(one.rendezvous("tag", bytes(most)) for one in workers))
        assert {len(payload) for payload in found[-1]} == {most}  # type: ignore[union-attr]
        with pytest.raises(UsageError, match=f"members is {most:,}"):
            await workers[0].rendezvous("tag", bytes(most + 1))


@pytest.mark.parametrize("wrong", [[0, 1], [4, 0], [4, 3, 2, 1, 0]])
async def test_other_replicas_under_the_tag_fail_for_all(
    five: list[Worker], wrong: list[int]
) -> None:
    erring = five[wrong[0]]
    calls = [
        worker.rendezvous("tag", b"", wrong if worker is erring else None)
        for worker in five
    ]
    for error in await outcomes(*calls):
        assert isinstance(error, BarrierBrokenError)
        assert f"rank {erring.rank} ('{erring.name}')" in str(error)
        assert "all 5 ranks" in str(error)
        assert str(wrong) in str(error)
        assert erring.name in error.missing
    await settled(five, "tag")


# --- what goes wrong -----------------------------------------------------------------


async def test_a_timeout_fails_for_all_and_says_who_did_not_come(
    five: list[Worker],
) -> None:
    a, *others = five
    found = await outcomes(
        *(
            one.rendezvous("tag", timeout_s=GIVES_UP_S if one is five[4] else None)
            for one in others
        )
    )
    error = found[-1]
    assert isinstance(error, BarrierTimeoutError)
    assert isinstance(error, TimeoutError)
    assert (error.number, error.missing) == (0, ("a",))
    absence = "within 2 s these members did not come: rank 0 ('a')"
    assert f"rendezvous 0 of 'tag': {absence}" in str(error)
    for error in found[:-1]:
        assert type(error) is BarrierBrokenError
        assert "rank 4 ('e') gave up rendezvous 0 of 'tag': it waited 2 s" in str(error)
        assert error.missing == ("a",)
    with pytest.raises(
        BarrierBrokenError, match=r"rank 4 \('e'\) gave up rendezvous 0"
    ):
        await a.rendezvous("tag")
    await settled(five, "tag")


async def test_a_cancelled_member_fails_it_for_all(five: list[Worker]) -> None:
    *others, last, late = five
    coming = asyncio.create_task(all_meet(others, "tag"))
    cancelled = asyncio.create_task(last.rendezvous("tag"))
    await until_all_have_heard(five, "tag")
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    for error in await coming:
        assert isinstance(error, BarrierBrokenError)
        assert "rank 3 ('d') gave up rendezvous 0 of 'tag': it was cancelled" in str(
            error
        )
    with pytest.raises(BarrierBrokenError, match="rank 3"):
        await late.rendezvous("tag")
    await settled(five, "tag")


async def test_what_fails_leaves_other_tags_be(five: list[Worker]) -> None:
    good = asyncio.create_task(all_meet(five[:4], "good"))
    bad = all_meet(five[:4], "bad")
    with pytest.raises(BarrierTimeoutError):
        await five[4].rendezvous("other", timeout_s=0.0)
    failed, _ = await asyncio.gather(
        bad,
        outcomes(five[4].rendezvous("bad", bytes(2 * MIB))),
    )
    assert {type(one) for one in failed} == {BarrierBrokenError}
    assert not good.done()
    found = await five[4].rendezvous("good", b"e")
    assert await good == [found] * 4 == [[b"a", b"b", b"c", b"d", b"e"]] * 4


async def test_a_call_that_gives_up_before_its_turn_counts(five: list[Worker]) -> None:
    """So the second of one worker fails with the second of the others."""
    *others, last = five
    first = [asyncio.create_task(one.rendezvous("tag", b"1")) for one in five[:4]]
    await asyncio.sleep(0)
    second = [asyncio.create_task(one.rendezvous("tag", b"2")) for one in others]
    third = [asyncio.create_task(one.rendezvous("tag", b"3")) for one in others]
    await asyncio.sleep(0)
    with pytest.raises(BarrierTimeoutError, match="an earlier call of this worker"):
        await others[0].rendezvous("tag", timeout_s=0.0)  # the fourth
    second[1].cancel()
    assert await last.rendezvous("tag", b"1") == [b"1"] * 5
    assert await asyncio.gather(*first) == [[b"1"] * 5] * 4
    with pytest.raises(
        BarrierBrokenError, match=r"rank 1 \('b'\) gave up a rendezvous"
    ):
        await last.rendezvous("tag", b"2")
    found = await asyncio.gather(*second, return_exceptions=True)
    assert isinstance(found.pop(1), asyncio.CancelledError)
    assert {type(one) for one in found} == {BarrierBrokenError}
    assert await last.rendezvous("tag", b"3") == [b"3"] * 5
    assert await asyncio.gather(*third) == [[b"3"] * 5] * 4
    failed = await all_meet([*others[1:], last], "tag")
    assert {type(one) for one in failed} == {BarrierBrokenError}
    await settled(five, "tag")


async def test_too_many_calls_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "CALLS_MAX", 2)
    async with Cluster(2) as (a, b):
        calls = [asyncio.create_task(a.rendezvous("tag", b"a")) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(UsageError, match="2 calls of this worker wait"):
            await a.rendezvous("tag")
        for _ in calls:
            assert await b.rendezvous("tag", b"b") == [b"a", b"b"]
        await asyncio.gather(*calls)


async def test_a_member_that_shuts_down_fails_it_for_all(five: list[Worker]) -> None:
    *others, last = five
    coming = asyncio.create_task(all_meet(others, "tag"))
    waiting = asyncio.create_task(outcomes(last.rendezvous("own", b"", [4, 0])))
    await until_all_have_heard(five, "tag")
    await until_all_have_heard([last, five[0]], "own")
    await last.shutdown()
    for error in await coming:
        assert isinstance(error, WorkerLostError)
        assert error.to == "e"
        assert "rank 4 ('e') is gone" in str(error)
    [error] = await waiting
    assert isinstance(error, BarrierBrokenError)
    assert "rank 4 ('e') gave up rendezvous 0 of 'own': it shuts down" in str(error)
    with pytest.raises(WorkerLostError, match=r"rank 4 \('e'\) is gone"):
        await asyncio.wait_for(others[3].rendezvous("another"), 30.0)
    ranks = [3, 2, 1, 0]
    found = await all_meet(others, "tag", ranks)
    assert found == [[b"d", b"c", b"b", b"a"]] * 4


async def test_a_call_whose_turn_comes_too_late_is_refused() -> None:
    """The worker has shut down meanwhile."""
    async with Cluster(2) as (a, _):
        calls = [asyncio.create_task(a.rendezvous("tag")) for _ in range(2)]
        await asyncio.sleep(0)
        await a.shutdown()
        first, second = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(first, BarrierBrokenError)
        assert isinstance(second, NotStartedError)


async def test_a_call_that_is_cancelled_as_its_turn_comes_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[asyncio.Task[list[bytes]]] = []
    let_next = vars(turns.CallTurns)["pass_on"]

    def let_next_and_cancel_it(calls_here: turns.CallTurns) -> None:
        let_next(calls_here)
        if len(calls) > 1:
            calls.pop().cancel()

    async with Cluster(2) as (a, b):
        calls += [asyncio.create_task(a.rendezvous("tag")) for _ in range(2)]
        first, second = calls
        await asyncio.sleep(0)
        monkeypatch.setattr(turns.CallTurns, "pass_on", let_next_and_cancel_it)
        assert await b.rendezvous("tag") == await first
        with pytest.raises(asyncio.CancelledError):
            await second
        with pytest.raises(BarrierBrokenError, match="stopped waiting before its turn"):
            await b.rendezvous("tag")
        await settled([a, b], "tag")


async def meet_there(tag: str, replicas: list[int] | None) -> list[bytes]:
    worker = asyncrpc.current_worker()
    return await worker.rendezvous(tag, worker.name.encode(), replicas)


async def until_here(tag: str) -> None:
    await until_all_have_heard([asyncrpc.current_worker()], tag)


@pytest.mark.parametrize("victim", ["b", "d"])
async def test_a_member_that_is_killed_fails_it_for_all(victim: str) -> None:
    """One in the middle of the tree, and a leaf of it."""
    names = ["b", "c", "d"]
    cluster = ProcessCluster(names, method="forkserver")
    async with cluster as worker:
        living = [name for name in names if name != victim]
        calls = [
            worker.parts.start_call(name, meet_there, ("tag", None)) for name in living
        ]
        own = asyncio.create_task(worker.rendezvous("tag", b"a"))
        for name in living:
            await worker.peer(name).call(until_here, "tag")
        assert not own.done()
        cluster.kill(victim)
        found = await outcomes(own, *calls)
        for error in found:
            assert isinstance(error, WorkerLostError)
            assert f"('{victim}') is gone" in str(error)
        left = [rank for rank, name in enumerate("abcd") if name != victim]
        calls = [
            worker.parts.start_call(name, meet_there, ("tag", left)) for name in living
        ]
        expected = [name.encode() for name in "abcd" if name != victim]
        found = await outcomes(worker.rendezvous("tag", b"a", left), *calls)
        assert found == [expected] * 3


# --- limits --------------------------------------------------------------------------


async def test_what_comes_early_is_bounded_and_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "EARLY_BYTES_MAX", 1000)
    async with Cluster(3) as (a, b, c):
        tags = ["x", "y", "z"]
        coming = [
            asyncio.create_task(one.rendezvous(tag, bytes(400)))
            for one in (b, c)
            for tag in tags
        ]
        await until(lambda: len(series_of(a.parts.rounds.machine)) == 3)
        for one in (b, c):  # what it told before has come before the answer
            await one.peer("a").call(abs, 1)
        held = [one.held_bytes for one in series_of(a.parts.rounds.machine)]
        assert 400 <= sum(held) <= 1000
        for tag in tags:
            assert await a.rendezvous(tag, b"") == [b"", bytes(400), bytes(400)]
        await asyncio.gather(*coming)


async def test_series_that_are_forgotten_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "SERIES_MAX", 2)
    async with Cluster(3) as workers:
        for number in range(10):
            await settled(workers, f"tag {number % 4}")
            await all_meet(workers[:2], f"pair {number}", [0, 1])
        for worker in workers:
            assert len(series_of(worker.parts.rounds.machine)) <= 3


@pytest.mark.parametrize(
    ("method", "value"),
    [
        ("arrivals", None),
        ("arrivals", ["RENDEZVOUS", "tag"]),
        ("arrivals", ["NOTHING", "tag", None, 0, -1, True, 0, b""]),
        ("arrivals", ["RENDEZVOUS", 7, None, 0, -1, True, 0, b""]),
        ("arrivals", ["RENDEZVOUS", "x" * 1025, None, 0, -1, True, 0, b""]),
        ("arrivals", ["RENDEZVOUS", "tag", [0, 1, 1], 0, -1, True, 0, b""]),
        ("arrivals", ["RENDEZVOUS", "tag", [0, 1, 9], 0, -1, True, 0, b""]),
        ("arrivals", ["RENDEZVOUS", "tag", [1, 2], 0, -1, True, 0, b""]),  # not to us
        ("arrivals", ["RENDEZVOUS", "tag", [0, 2], 0, -1, True, 0, b""]),  # not by it
        ("arrivals", ["BARRIER", "", [2, 0, 1], 0, -1, True, 0, b""]),  # no neighbours
        ("up", ["BARRIER", "", None, 0, -1, 0, 1, [b"\x92\xc4\x00\xc4\x00"]]),  # of two
        ("up", ["RENDEZVOUS", "tag", None]),
        ("up", ["RENDEZVOUS", "tag", None, 0, "1", 0, 1, [b"\x91\xc4\x00"]]),
        ("down", ["BARRIER", "", None, 0, 0, 1, [b"\x93\xc4\x00\xc4\x00\xc4\x00"]]),
        ("elsewhere", ["RENDEZVOUS", "tag", None, 0, 7, [[0, 1], 0]]),
        ("nothing", ["tag", None]),
    ],
)
async def test_what_makes_no_sense_is_dropped(
    method: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """From a child to the root; the meetings that follow know nothing of it."""
    async with Cluster(3) as (a, b, c):
        link = await b.parts.link_to("a")
        raw_messages.tell(link, "rounds", method, value)
        assert await b.peer("a").call(max, 1, 2) == 2  # so the other has arrived
        assert f"notice of 'b' could not be taken: rounds.{method}" in caplog.text
        assert await b.parts.link_to("a") is link
        await settled((a, b, c), "tag")


async def test_nothing_is_asked_for_there() -> None:
    async with Cluster(2) as (a, _):
        link = await a.parts.link_to("b")
        text = "sent a wrong message: 'rounds\\.arrivals', which"
        with pytest.raises(asyncrpc.AsyncRpcError, match=text):
            await raw_messages.request(link, "rounds", "arrivals", None)
