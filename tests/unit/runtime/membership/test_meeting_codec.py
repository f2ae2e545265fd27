"""The words of a rendezvous are read as they were said, and nothing else is."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrpc.errors import MalformedError
from asyncrpc.runtime.machine.series import (
    Blame,
    Doubt,
    Failed,
    Failure,
    Here,
    Report,
    Result,
    Turn,
    Word,
)
from asyncrpc.runtime.membership.meeting_codec import (
    MEETING_BYTES_MAX,
    PART_BYTES,
    PAYLOAD_BYTES_MAX,
    PIECE_BYTES,
    Arriving,
    Reader,
    messages_for,
    pack,
    payload_bytes_max,
    take_part,
    unpack,
)

SIZE = 6
READER = Reader(rank=1, size=SIZE)

numbers = st.integers(-1, 1 << 40)
replicas = st.none() | st.permutations(range(SIZE)).map(lambda all_: tuple(all_[:4]))
turns = st.builds(Turn, replicas, numbers)
failures = st.builds(
    Failure,
    st.sampled_from(Blame),
    st.text(max_size=40),
    st.lists(st.text(max_size=9), max_size=4).map(tuple),
    st.none() | turns,
)


@st.composite
def plain_words(draw: st.DrawFn) -> Word:
    kind = draw(st.sampled_from([Here, Failed, Doubt]))
    if kind is Failed:
        return Failed(draw(numbers), draw(numbers), draw(failures))
    if kind is Doubt:
        return Doubt(draw(numbers), draw(st.integers(0, SIZE)), draw(turns))
    latest = draw(numbers)
    number = draw(st.integers(-1, latest))
    known = draw(st.integers(0, (1 << SIZE) - 1))
    return Here(number, draw(numbers), draw(st.booleans()), latest, known)


def travelled(value: Any) -> Any:
    """Return a value as the other end gets it."""
    return msgpack.unpackb(msgpack.packb(value))


@given(plain_words())
def test_a_word_is_read_as_it_was_said(word: Word) -> None:
    [(method, value)] = messages_for(word)
    assert READER.plain_word(method, travelled(value), SIZE) == word


@given(
    lengths=st.lists(
        st.sampled_from([0, 1, 100, PIECE_BYTES, PART_BYTES - 9, PART_BYTES, 700_000]),
        min_size=1,
        max_size=8,
    ),
    number=numbers,
)
def test_payloads_are_put_together_again(lengths: list[int], number: int) -> None:
    payloads = tuple(bytes([n]) * nbytes for n, nbytes in enumerate(lengths))
    for word in (Report(number, number, payloads), Result(number, payloads)):
        arriving: Arriving | None = None
        for method, sent in messages_for(word, pack(payloads)):
            value = travelled(sent)
            assert sum(map(len, value[-1])) <= PART_BYTES
            if method == "up":
                assert value.pop(1) == number
            arriving = take_part(arriving, method, value, len(lengths))
        assert arriving is not None
        assert arriving.nbytes >= sum(lengths)
        assert arriving.parts == arriving.head[2]
        assert unpack(arriving, len(lengths)) == payloads


def test_what_each_may_bring() -> None:
    assert payload_bytes_max(1) == payload_bytes_max(16) == PAYLOAD_BYTES_MAX
    assert payload_bytes_max(4096) == MEETING_BYTES_MAX // 4096 == 4096


@pytest.mark.parametrize(
    ("method", "value"),
    [
        ("here", []),
        ("here", [0, -1, True, 0]),
        ("here", [0, -1, 1, 0, b""]),
        ("here", [0, -1, True, 0, ""]),
        ("here", [-2, -1, True, 0, b""]),
        ("here", [0, 1 << 63, True, 0, b""]),
        ("here", [1, -1, True, 0, b""]),  # later than the latest
        ("here", [0, -1, True, 0, b"\x40"]),  # a seventh of six members
        ("failed", [0, -1]),
        ("failed", [0, -1, []]),
        ("failed", [0, -1, ["NOBODY", "problem", [], None]]),
        ("failed", [0, -1, ["LOST", 7, [], None]]),
        ("failed", [0, -1, ["LOST", "problem", [7], None]]),
        ("failed", [0, -1, ["LOST", "problem", ["x"] * 65, None]]),
        ("failed", [0, -1, ["LOST", "problem", [], [None]]]),
        ("failed", [0, -1, ["LOST", "problem", [], [[0, 0], 1]]]),
        ("doubt", [0, 1, []]),
        ("doubt", [0, 1, [[0, 7], 0]]),
        ("doubt", [0, 1, [None, -7]]),
        ("gone", [0]),
    ],
)
def test_what_makes_no_sense_is_refused(method: str, value: list[Any]) -> None:
    with pytest.raises(MalformedError):
        READER.plain_word(method, value, SIZE)


def test_a_long_text_is_cut() -> None:
    word = READER.plain_word("failed", [0, -1, ["LOST", "x" * 9999, [], None]], SIZE)
    assert isinstance(word, Failed)
    assert len(word.failure.problem) == 4096


@pytest.mark.parametrize(
    "value",
    [
        7,
        "all",
        [1, "2"],
        [1, True],
        [1, 1],
        [1, 6],
        [-1, 1],
        [0, 2],
        [],
        [*range(SIZE)],
    ],
)
def test_replicas_that_make_no_sense_are_refused(value: Any) -> None:
    with pytest.raises(MalformedError):
        READER.replicas(value)


def test_replicas() -> None:
    assert READER.replicas(None) is None
    assert READER.replicas([5, 1]) == (5, 1)
    assert READER.replicas([5, 0], with_me=False) == (5, 0)


@pytest.mark.parametrize(
    "value",
    [
        [],
        [0, 0, 1],
        [0, 0, 1, []],
        [0, 0, 0, [b"x"]],
        [0, 1, 1, [b"x"]],
        [0, -1, 1, [b"x"]],
        [0, 0, 99, [b"x"]],  # more than there can be
        [0, 0, 1, ["x"]],
        [0, 0, 1, [b"x"] * 17],
        [0, 0, 1, [bytes(PIECE_BYTES + 1)]],
        [-9, 0, 1, [b"x"]],
    ],
)
def test_parts_that_make_no_sense_are_refused(value: list[Any]) -> None:
    with pytest.raises(MalformedError):
        take_part(None, "down", value, SIZE)


def test_parts_whose_beginning_is_not_here_are_left_out() -> None:
    first = take_part(None, "down", [3, 0, 3, [b"a"]], SIZE)
    assert first is not None
    assert take_part(None, "down", [3, 1, 3, [b"b"]], SIZE) is None
    assert take_part(first, "down", [3, 2, 3, [b"c"]], SIZE) is None
    assert take_part(first, "down", [4, 1, 3, [b"b"]], SIZE) is None
    assert take_part(first, "up", [3, 1, 3, [b"b"]], SIZE) is None
    again = take_part(first, "down", [3, 0, 1, [b"d"]], SIZE)
    assert again is not None
    assert again.pieces == [b"d"]


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"\xc1",
        msgpack.packb({}),
        msgpack.packb([b"x", "text"]),
        msgpack.packb([b""] * (SIZE + 1)),
        msgpack.packb([bytes(PAYLOAD_BYTES_MAX + 1)]),
    ],
)
def test_payloads_that_make_no_sense_are_refused(blob: bytes) -> None:
    with pytest.raises(MalformedError):
        unpack(Arriving(("down", 0, 1), [blob], 1), SIZE)
