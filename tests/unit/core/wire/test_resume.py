"""What is kept until it has been acknowledged, and what is sent again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrpc.core.wire.resume import (
    Receipts,
    RetransmitBuffer,
)
from asyncrpc.errors import MalformedError


def kept_of(*parts: bytes) -> RetransmitBuffer:
    kept = RetransmitBuffer()
    kept.add(parts)
    return kept


def test_acknowledged_parts_are_released() -> None:
    kept = kept_of(b"abc", b"de", b"f")
    kept.acknowledge(4)  # inside the second
    assert (kept.nbytes, kept.start) == (3, 3)
    with pytest.raises(MalformedError, match="has acknowledged 4"):
        kept.rest(3)
    kept.acknowledge(6)
    assert kept.nbytes == 0


def test_unacknowledged_rest_may_begin_inside_a_part() -> None:
    assert b"".join(kept_of(b"abc", b"de", b"f").rest(4)) == b"ef"


def test_unacknowledged_rest_can_be_read_twice() -> None:
    kept = kept_of(b"abc", b"de")
    assert b"".join(kept.rest(1)) == b"bcde"
    assert b"".join(kept.rest(1)) == b"bcde"


@pytest.mark.parametrize("received", [7, 1 << 62])
def test_ack_of_more_than_was_sent_is_refused(received: int) -> None:
    with pytest.raises(MalformedError, match="but 6 were sent"):
        kept_of(b"abc", b"def").acknowledge(received)


def test_old_ack_changes_nothing() -> None:
    kept = kept_of(b"abc")
    kept.acknowledge(3)
    kept.acknowledge(1)
    with pytest.raises(MalformedError, match="has acknowledged 3"):
        kept.rest(1)


def test_rest_before_the_last_ack_is_refused() -> None:
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
def test_kept_bytes_are_those_sent_and_not_acknowledged(
    writes: list[bytes], acknowledged: list[int]
) -> None:
    stream = b"".join(writes)
    kept = kept_of(*writes)
    for received in sorted(min(count, len(stream)) for count in acknowledged):
        kept.acknowledge(received)
        assert kept.start <= received
        assert b"".join(kept.rest(received)) == stream[received:]
        longest = max(map(len, writes), default=0)
        assert kept.nbytes <= len(stream) - received + longest


class TestReceipts:
    def test_unbegun_receipts_are_never_due(self) -> None:
        receipts = Receipts()
        receipts.received += 1 << 40
        assert receipts.received < receipts.due_at
        assert not receipts.has_news(0)

    def test_receipt_is_due_after_a_number_of_bytes(self) -> None:
        receipts = Receipts()
        receipts.received = 5
        receipts.begin(10)
        assert receipts.due_at == 15
        receipts.received = 16
        assert receipts.has_news(16)
        assert not receipts.has_news(17)
        assert receipts.acknowledge() == 16
        assert receipts.due_at == 26
        assert not receipts.has_news(1)
        assert receipts.has_news(0)
