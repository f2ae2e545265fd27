"""A message says what holds when it is written; an unreachable neighbour is reported.

The second of two workers is only known: a test ends the dials to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgpack
import pytest

from asyncrpc.core.barriers.messages import (
    PROBLEM_CHARS_MAX,
    Blame,
    Failure,
    Key,
    KnownArrivals,
    Purpose,
    Report,
    Result,
    RoundFailed,
    SeriesNotice,
    TagRound,
    WaitsElsewhere,
    check_notice,
    check_replicas,
)
from asyncrpc.core.barriers.service import LAST_MESSAGE_S, STALL_S, BarrierService
from asyncrpc.core.services.schema import Notice, UnfitError
from asyncrpc.errors import MalformedError, WorkerLostError
from tests.unit.core.membership.peers import Company, run

KEY = Key(Purpose.RENDEZVOUS, "tag", (1, 0))  # the first worker is the child
LOST = WorkerLostError("gone", to="b", function="connect")
Play = Callable[[Company, BarrierService], Awaitable[None]]


def played(play: Play) -> None:
    """Let the first of two workers wait for the second, and then end."""

    async def main() -> None:
        company = Company("a", "b")
        peers: Any = company
        await play(company, BarrierService(peers, company, peers))

    run(main())


def methods(company: Company) -> list[str]:
    return [method for _, method, _ in company.find("b").new_link.sent]


def test_a_message_for_a_link_is_never_out_of_date_and_sent_once() -> None:
    async def play(company: Company, service: BarrierService) -> None:
        joining = asyncio.create_task(service.participant(KEY).join(None))
        await asyncio.sleep(5 * STALL_S)
        service.participant(KEY).give_up("had no time")
        await joining
        company.connect("b")
        await company.settle()
        assert methods(company) == ["failed"]

    played(play)


@pytest.mark.parametrize("patience_s", [0.0, LAST_MESSAGE_S])
def test_unreachable_neighbour_fails_the_round_after_a_while(patience_s: float) -> None:
    """It may have left in order, and its last message may be on its way."""

    async def play(company: Company, service: BarrierService) -> None:
        part = service.participant(KEY)
        part.connect(1, patience_s)
        joining = asyncio.create_task(part.join(None))
        await company.settle()
        company.fail("b", LOST)
        if patience_s:
            await asyncio.sleep(0.9 * patience_s)
            assert part.series.is_waiting
        await asyncio.sleep(0.2 * LAST_MESSAGE_S)
        failure = await joining
        assert failure is not None
        assert failure.missing == (1,)

    played(play)


def test_a_dial_that_is_cancelled_before_it_began_is_forgotten() -> None:
    async def play(company: Company, service: BarrierService) -> None:
        part = service.participant(KEY)
        part.send(1)
        for task in company.tasks:
            task.cancel()
        await company.settle()
        part.send(1)
        company.connect("b")
        await company.settle()
        assert methods(company) == ["arrivals"]

    played(play)


def test_forgotten_workers_are_named_by_rank() -> None:
    async def play(company: Company, service: BarrierService) -> None:
        assert (service.name_of(1), service.rank_of("b")) == ("b", 1)
        company.forget("b")
        assert (service.name_of(1), service.rank_of("b")) == ("rank 1", -1)

    played(play)


SIZE = 6
TAG_KEY = Key(Purpose.RENDEZVOUS, "tag", (5, 1))
TURN = TagRound((0, 3), 2)


@pytest.mark.parametrize(
    "notice",
    [
        KnownArrivals(TAG_KEY, 0, -1, is_waiting=True, latest=3, known=0b11),
        Report(TAG_KEY, 1, -1, is_marked=True),
        Result(TAG_KEY, 1, is_marked=False),
        RoundFailed(TAG_KEY, 1, 0, Failure(Blame.MISMATCH, "problem", (3, 1), TURN)),
        WaitsElsewhere(TAG_KEY, 1, 5, TURN),
    ],
)
def test_a_message_arrives_as_it_was_sent(notice: Any) -> None:
    read = notice.record.read(msgpack.unpackb(msgpack.packb(notice.pack())))
    assert read == notice
    check_notice(read, 2, SIZE)
    check_replicas(read.key.replicas, SIZE)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (KnownArrivals, []),
        (KnownArrivals, [0, -1, 1, 0, b""]),
        (KnownArrivals, [0, -1, True, 0, ""]),
        (KnownArrivals, [-2, -1, True, 0, b""]),
        (KnownArrivals, [0, 1 << 63, True, 0, b""]),
        (RoundFailed, [0, -1, []]),
        (RoundFailed, [0, -1, ["NOBODY", "problem", [], None]]),
        (RoundFailed, [0, -1, ["LOST", "problem", ["x"], None]]),
        (RoundFailed, [0, -1, ["LOST", "problem", [], [None]]]),
        (WaitsElsewhere, [0, 1, [None, -7]]),
        (Report, [0, -1, 1]),
        (Report, [-1, -1, True]),
        (Result, [-1, True]),
    ],
)
def test_wrong_content_is_refused(kind: type[Notice], value: list[Any]) -> None:
    with pytest.raises(UnfitError):
        kind.record.read(["RENDEZVOUS", "tag", None, *value])


@pytest.mark.parametrize(
    "notice",
    [
        KnownArrivals(TAG_KEY, 1, -1, is_waiting=True, latest=0, known=0),
        KnownArrivals(TAG_KEY, 0, -1, is_waiting=True, latest=0, known=0b100),  # of two
        RoundFailed(TAG_KEY, 0, -1, Failure(Blame.LOST, "x" * (PROBLEM_CHARS_MAX + 1))),
        RoundFailed(TAG_KEY, 0, -1, Failure(Blame.LOST, "problem", (0,) * 65)),
        RoundFailed(TAG_KEY, 0, -1, Failure(Blame.LOST, "problem", (SIZE,))),
        RoundFailed(TAG_KEY, 0, -1, Failure(Blame.LOST, "", (), TagRound((0, 0), 1))),
        WaitsElsewhere(TAG_KEY, 0, 1, TagRound((0, 7), 0)),
        WaitsElsewhere(TAG_KEY, 0, SIZE, TagRound(None, 0)),
    ],
)
def test_contradictions_are_refused(notice: SeriesNotice) -> None:
    with pytest.raises(MalformedError):
        check_notice(notice, 2, SIZE)


@pytest.mark.parametrize("wrong", [(1, 1), (1, 6), (-1, 1), tuple(range(SIZE))])
def test_replicas_that_are_not_distinct_ranks_are_refused(wrong: Any) -> None:
    with pytest.raises(MalformedError):
        check_replicas(wrong, SIZE)
