"""The messages of a round are read as they were said, and nothing else is."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrpc.errors import MalformedError
from asyncrpc.runtime.messages import Notice
from asyncrpc.runtime.rounds.machine.messages import (
    Blame,
    Failure,
    Key,
    KnownArrivals,
    Purpose,
    Report,
    Result,
    RoundFailed,
    TagRound,
    WaitsElsewhere,
)
from asyncrpc.runtime.rounds.messages import (
    PART_BYTES,
    PAYLOAD_BYTES_MAX,
    PIECE_BYTES,
    PROBLEM_CHARS_MAX,
    ROUND_BYTES_MAX,
    ArrivalsNotice,
    Arriving,
    DownNotice,
    ElsewhereNotice,
    FailedNotice,
    PayloadPart,
    UpNotice,
    check_message,
    check_part,
    check_replicas,
    notices,
    pack,
    payload_bytes_max,
    take_part,
    unpack,
)
from asyncrpc.runtime.schema import UnfitError

SIZE = 6
KEY = Key(Purpose.RENDEZVOUS, "tag", (1, 0, 3))

numbers = st.integers(-1, 1 << 40)
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
def plain_words(draw: st.DrawFn) -> KnownArrivals | RoundFailed | WaitsElsewhere:
    kind = draw(st.sampled_from([KnownArrivals, RoundFailed, WaitsElsewhere]))
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


@given(keys, plain_words())
def test_a_word_is_read_as_it_was_said(
    key: Key, content: KnownArrivals | RoundFailed | WaitsElsewhere
) -> None:
    notice: Any
    [notice] = notices(key, content, [])
    read = travelled(notice)
    assert type(read) is type(notice)
    assert (read.key, read.content) == (key, content)
    check_message(read.content, SIZE, SIZE)
    check_replicas(read.key.replicas, SIZE)


@given(
    lengths=st.lists(
        st.sampled_from([0, 1, 100, PIECE_BYTES, PART_BYTES - 9, PART_BYTES, 700_000]),
        min_size=1,
        max_size=8,
    ),
    number=st.integers(0, 1 << 40),
)
def test_payloads_are_put_together_again(lengths: list[int], number: int) -> None:
    payloads = tuple(bytes([n]) * nbytes for n, nbytes in enumerate(lengths))
    for content in (Report(number, number, payloads), Result(number, payloads)):
        arriving: Arriving | None = None
        for sent in notices(KEY, content, pack(payloads)):
            notice = travelled(sent)
            assert sum(map(len, notice.part.pieces)) <= PART_BYTES
            check_part(notice.part, len(lengths))
            arriving = take_part(arriving, notice)
        assert arriving is not None
        assert arriving.is_whole
        assert arriving.nbytes >= sum(lengths)
        most = payload_bytes_max(len(lengths))
        assert unpack(arriving.pieces, len(lengths), most) == payloads


def test_empty_payloads_take_no_room() -> None:
    assert pack((b"",) * 4096) == [PayloadPart(0, 1, [])]
    assert unpack([], 4096, 10) == (b"",) * 4096


def test_what_each_may_bring() -> None:
    assert payload_bytes_max(1) == payload_bytes_max(16) == PAYLOAD_BYTES_MAX
    assert payload_bytes_max(4096) == ROUND_BYTES_MAX // 4096 == 4096


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
        (UpNotice, [0, -1, 0, 0, [b"x"]]),
        (UpNotice, [-1, -1, 0, 1, [b"x"]]),
        (DownNotice, [0, 0, 1, ["x"]]),
        (DownNotice, [0, -1, 1, [b"x"]]),
    ],
)
def test_what_has_not_the_form_is_refused(kind: type[Notice], value: list[Any]) -> None:
    content = ["RENDEZVOUS", "tag", None, *value]
    with pytest.raises(UnfitError):
        kind.record.read(content)


@pytest.mark.parametrize("purpose", ["NOTHING", "barrier", 0, None])
def test_a_purpose_that_is_none_is_refused(purpose: Any) -> None:
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
    ],
)
def test_a_word_that_contradicts_itself_is_refused(
    content: KnownArrivals | RoundFailed | WaitsElsewhere,
) -> None:
    with pytest.raises(MalformedError):
        check_message(content, SIZE, SIZE)


@pytest.mark.parametrize("wrong", [(1, 1), (1, 6), (-1, 1), tuple(range(SIZE))])
def test_replicas_that_make_no_sense_are_refused(wrong: tuple[int, ...]) -> None:
    with pytest.raises(MalformedError):
        check_replicas(wrong, SIZE)


def test_replicas() -> None:
    for right in (None, (5, 1), (5, 0)):
        check_replicas(right, SIZE)


@pytest.mark.parametrize(
    "part",
    [
        PayloadPart(0, 2, []),
        PayloadPart(1, 1, [b"x"]),
        PayloadPart(0, 99, [b"x"]),  # more than there can be
        PayloadPart(0, 1, [b"x"] * 17),
        PayloadPart(0, 1, [bytes(PIECE_BYTES + 1)]),
    ],
)
def test_parts_that_make_no_sense_are_refused(part: PayloadPart) -> None:
    with pytest.raises(MalformedError):
        check_part(part, SIZE)


def test_parts_whose_beginning_is_not_here_are_left_out() -> None:
    def down(number: int, index: int, parts: int, piece: bytes) -> DownNotice:
        return DownNotice(KEY, number, PayloadPart(index, parts, [piece]))

    first = take_part(None, down(3, 0, 3, b"a"))
    assert first is not None
    assert take_part(None, down(3, 1, 3, b"b")) is None
    assert take_part(first, down(3, 2, 3, b"c")) is None
    assert take_part(first, down(4, 1, 3, b"b")) is None
    assert take_part(first, UpNotice(KEY, 3, -1, PayloadPart(1, 3, [b"b"]))) is None
    again = take_part(first, down(3, 0, 1, b"d"))
    assert again is not None
    assert again.pieces == [b"d"]


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"\xc1",
        msgpack.packb({}),
        msgpack.packb([b"x"] * (SIZE - 1)),
        msgpack.packb([b"x", *["text"] * (SIZE - 1)]),
        msgpack.packb([b""] * (SIZE + 1)),
        msgpack.packb([[b""] * SIZE] * SIZE),
        msgpack.packb([[], *[b""] * (SIZE - 1)]),
        msgpack.packb([{}, *[b""] * (SIZE - 1)]),
        msgpack.packb([bytes(PAYLOAD_BYTES_MAX + 1), *[b""] * (SIZE - 1)]),
    ],
)
def test_payloads_that_make_no_sense_are_refused(blob: bytes) -> None:
    with pytest.raises(MalformedError):
        unpack([blob], SIZE, payload_bytes_max(SIZE))
