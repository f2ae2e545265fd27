"""What is kept until it has been acknowledged, and what is sent again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrpc.errors import MalformedError
from asyncrpc.wire.resume import RetransmitBuffer


def kept_of(*parts: bytes) -> RetransmitBuffer:
    kept = RetransmitBuffer()
    kept.add(parts)
    return kept


def test_whole_parts_are_let_go() -> None:
    kept = kept_of(b"abc", b"de", b"f")
    kept.acknowledge(4)  # inside the second
    assert kept.nbytes == 3
    assert kept.start == 3
    assert kept.acknowledged == 4
    kept.acknowledge(6)
    assert kept.nbytes == 0


def test_the_rest_begins_inside_a_part() -> None:
    assert b"".join(kept_of(b"abc", b"de", b"f").rest(4)) == b"ef"


def test_asking_for_the_rest_twice_gives_it_twice() -> None:
    kept = kept_of(b"abc", b"de")
    assert b"".join(kept.rest(1)) == b"bcde"
    assert b"".join(kept.rest(1)) == b"bcde"


@pytest.mark.parametrize("received", [7, 1 << 62])
def test_more_than_was_sent_is_refused(received: int) -> None:
    with pytest.raises(MalformedError, match="6 that were sent"):
        kept_of(b"abc", b"def").acknowledge(received)


def test_an_old_acknowledgement_is_no_news() -> None:
    kept = kept_of(b"abc")
    kept.acknowledge(3)
    kept.acknowledge(1)
    assert kept.acknowledged == 3


def test_less_cannot_have_been_read_than_was_acknowledged() -> None:
    kept = kept_of(b"abc")
    kept.acknowledge(2)
    with pytest.raises(MalformedError, match="has acknowledged 2"):
        kept.rest(1)


def test_payloads_are_kept_without_a_copy() -> None:
    payload = bytearray(b"payload")
    kept = RetransmitBuffer()
    kept.add([b"head", memoryview(payload)])
    payload[:] = b"PAYLOAD"
    assert b"".join(kept.rest(6)) == b"YLOAD"


@given(
    st.lists(st.binary(max_size=6), max_size=12),
    st.lists(st.integers(0, 72), max_size=8),
)
def test_what_is_kept_is_what_was_sent_and_not_read(
    writes: list[bytes], acknowledged: list[int]
) -> None:
    stream = b"".join(writes)
    kept = kept_of(*writes)
    for received in sorted(min(one, len(stream)) for one in acknowledged):
        kept.acknowledge(received)
        assert kept.start <= received
        assert b"".join(kept.rest(received)) == stream[received:]
        longest = max(map(len, writes), default=0)
        assert kept.nbytes <= len(stream) - received + longest
