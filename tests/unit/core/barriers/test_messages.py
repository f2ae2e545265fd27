"""Messages of series that are malformed or contradict themselves are refused."""

from __future__ import annotations

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
from asyncrpc.core.services.messages import Notice
from asyncrpc.core.services.schema import UnfitError
from asyncrpc.errors import MalformedError

SIZE = 6
KEY = Key(Purpose.RENDEZVOUS, "tag", (5, 1))
TURN = TagRound((0, 3), 2)


@pytest.mark.parametrize(
    "notice",
    [
        KnownArrivals(KEY, 0, -1, is_waiting=True, latest=3, known=0b11),
        Report(KEY, 1, -1, is_marked=True),
        Result(KEY, 1, is_marked=False),
        RoundFailed(KEY, 1, 0, Failure(Blame.MISMATCH, "problem", (3, 1), TURN)),
        WaitsElsewhere(KEY, 1, 5, TURN),
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
        KnownArrivals(KEY, 1, -1, is_waiting=True, latest=0, known=0),
        KnownArrivals(KEY, 0, -1, is_waiting=True, latest=0, known=0b100),  # of two
        RoundFailed(KEY, 0, -1, Failure(Blame.LOST, "x" * (PROBLEM_CHARS_MAX + 1))),
        RoundFailed(KEY, 0, -1, Failure(Blame.LOST, "problem", (0,) * 65)),
        RoundFailed(KEY, 0, -1, Failure(Blame.LOST, "problem", (SIZE,))),
        RoundFailed(KEY, 0, -1, Failure(Blame.LOST, "", (), TagRound((0, 0), 1))),
        WaitsElsewhere(KEY, 0, 1, TagRound((0, 7), 0)),
        WaitsElsewhere(KEY, 0, SIZE, TagRound(None, 0)),
    ],
)
def test_contradictions_are_refused(notice: SeriesNotice) -> None:
    with pytest.raises(MalformedError):
        check_notice(notice, 2, SIZE)


@pytest.mark.parametrize("wrong", [(1, 1), (1, 6), (-1, 1), tuple(range(SIZE))])
def test_replicas_that_are_not_distinct_ranks_are_refused(wrong: Any) -> None:
    with pytest.raises(MalformedError):
        check_replicas(wrong, SIZE)
