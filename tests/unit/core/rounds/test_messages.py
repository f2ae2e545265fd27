"""The messages of a round are read as they were said, and nothing else is."""

from __future__ import annotations

from typing import Any, get_args

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrpc.core.rounds.machine.messages import (
    Blame,
    Failure,
    Key,
    KnownArrivals,
    Purpose,
    Report,
    Result,
    RoundFailed,
    RoundMessage,
    TagRound,
    WaitsElsewhere,
)
from asyncrpc.core.rounds.messages import (
    PROBLEM_CHARS_MAX,
    ArrivalsNotice,
    ElsewhereNotice,
    FailedNotice,
    ReportNotice,
    ResultNotice,
    check_message,
    check_replicas,
    notice_of,
)
from asyncrpc.core.services.messages import Notice
from asyncrpc.core.services.schema import UnfitError
from asyncrpc.errors import MalformedError

SIZE = 6

numbers = st.integers(-1, 1 << 40)
counts = st.integers(0, 1 << 40)
ranks = st.integers(0, SIZE - 1)
replicas = st.none() | st.permutations(range(SIZE)).map(lambda all_: tuple(all_[:4]))
keys = st.builds(Key, st.sampled_from(Purpose), st.text(max_size=9), replicas)
turns = st.builds(TagRound, replicas, numbers)
failures = st.builds(
    Failure,
    st.sampled_from(Blame),
    st.text(max_size=40),
    st.lists(ranks, max_size=4).map(tuple),
    st.none() | turns,
)


@st.composite
def messages(draw: st.DrawFn) -> RoundMessage:
    kind = draw(st.sampled_from(get_args(RoundMessage)))
    if kind is Report:
        return Report(draw(counts), draw(numbers), draw(st.booleans()))
    if kind is Result:
        return Result(draw(counts), draw(st.booleans()))
    if kind is RoundFailed:
        return RoundFailed(draw(numbers), draw(numbers), draw(failures))
    if kind is WaitsElsewhere:
        return WaitsElsewhere(draw(numbers), draw(ranks), draw(turns))
    latest = draw(numbers)
    number = draw(st.integers(-1, latest))
    known = draw(st.integers(0, (1 << SIZE) - 1))
    return KnownArrivals(number, draw(numbers), draw(st.booleans()), latest, known)


def travelled(notice: Any) -> Any:
    """Return a message as the other end reads it."""
    return notice.record.read(msgpack.unpackb(msgpack.packb(notice.pack())))


@given(keys, messages())
def test_message_is_read_as_it_was_sent(key: Key, content: RoundMessage) -> None:
    notice = notice_of(key, content)
    read = travelled(notice)
    assert type(read) is type(notice)
    assert (read.key, read.content) == (key, content)
    check_message(read.content, SIZE, SIZE)
    check_replicas(read.key.replicas, SIZE)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (ArrivalsNotice, []),
        (ArrivalsNotice, [0, -1, True, 0]),
        (ArrivalsNotice, [0, -1, 1, 0, b""]),
        (ArrivalsNotice, [0, -1, True, 0, ""]),
        (ArrivalsNotice, [-2, -1, True, 0, b""]),
        (ArrivalsNotice, [0, 1 << 63, True, 0, b""]),
        (FailedNotice, [0, -1]),
        (FailedNotice, [0, -1, []]),
        (FailedNotice, [0, -1, ["NOBODY", "problem", [], None]]),
        (FailedNotice, [0, -1, ["LOST", 7, [], None]]),
        (FailedNotice, [0, -1, ["LOST", "problem", ["x"], None]]),
        (FailedNotice, [0, -1, ["LOST", "problem", [], [None]]]),
        (ElsewhereNotice, [0, 1, []]),
        (ElsewhereNotice, [0, 1, [None, -7]]),
        (ReportNotice, [0, -1]),
        (ReportNotice, [0, -1, 1]),
        (ResultNotice, [0, None]),
    ],
)
def test_malformed_notice_is_refused(kind: type[Notice], value: list[Any]) -> None:
    content = ["RENDEZVOUS", "tag", None, *value]
    with pytest.raises(UnfitError):
        kind.record.read(content)


@pytest.mark.parametrize("purpose", ["NOTHING", "barrier", 0, None])
def test_unknown_purpose_is_refused(purpose: Any) -> None:
    content = [purpose, "", None, 0, -1, True, 0, b""]
    with pytest.raises(UnfitError, match="purpose must be one of 'BARRIER', "):
        ArrivalsNotice.record.read(content)


@pytest.mark.parametrize(
    "content",
    [
        KnownArrivals(
            1, -1, is_waiting=True, latest=0, known=0
        ),  # later than the latest
        KnownArrivals(
            0, -1, is_waiting=True, latest=0, known=1 << SIZE
        ),  # a seventh of six
        RoundFailed(0, -1, Failure(Blame.LOST, "x" * (PROBLEM_CHARS_MAX + 1))),
        RoundFailed(0, -1, Failure(Blame.LOST, "problem", (0,) * 65)),
        RoundFailed(0, -1, Failure(Blame.LOST, "problem", (SIZE,))),
        RoundFailed(0, -1, Failure(Blame.LOST, "problem", (-1,))),
        RoundFailed(0, -1, Failure(Blame.MISMATCH, "problem", (), TagRound((0, 0), 1))),
        WaitsElsewhere(0, 1, TagRound((0, 7), 0)),
        WaitsElsewhere(0, SIZE, TagRound(None, 0)),
        Report(-1, -1, is_marked=False),
        Result(-1, is_marked=False),
    ],
)
def test_contradictory_message_is_refused(content: RoundMessage) -> None:
    with pytest.raises(MalformedError):
        check_message(content, SIZE, SIZE)


@pytest.mark.parametrize("wrong", [(1, 1), (1, 6), (-1, 1), tuple(range(SIZE))])
def test_impossible_replicas_are_refused(wrong: tuple[int, ...]) -> None:
    with pytest.raises(MalformedError):
        check_replicas(wrong, SIZE)


def test_valid_replicas_are_accepted() -> None:
    for right in (None, (5, 1), (5, 0)):
        check_replicas(right, SIZE)
