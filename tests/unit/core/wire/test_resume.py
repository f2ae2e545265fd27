"""What is kept until it has been acknowledged, and what is sent again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrpc.core.wire.resume import (
    TRANSITIONS,
    Receipts,
    ResumeEvent,
    ResumeState,
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


OVER = {ResumeState.ENDING, ResumeState.ENDED}
BROKEN = (ResumeState.BROKEN, ResumeState.CLOSING_BROKEN)


def after(state: ResumeState, *events: ResumeEvent) -> ResumeState:
    for event in events:
        state = TRANSITIONS[state].get(event, state)
    return state


class TestWhetherItOutlivesItsTransport:
    def test_every_state_is_reached_from_the_first(self) -> None:
        reached = {ResumeState.NOT_RESUMABLE}
        for _ in ResumeState:
            reached |= {
                after(state, event) for state in reached for event in ResumeEvent
            }
        assert reached == set(ResumeState)

    @pytest.mark.parametrize("state", ResumeState)
    def test_ended_state_is_final(self, state: ResumeState) -> None:
        assert after(state, ResumeEvent.END) is ResumeState.ENDED
        for event in ResumeEvent:
            assert after(ResumeState.ENDED, event) is ResumeState.ENDED

    @pytest.mark.parametrize("state", ResumeState)
    def test_connected_stream_alone_outlives_its_transport(
        self, state: ResumeState
    ) -> None:
        lost = after(state, ResumeEvent.LOSE)
        connected = state is ResumeState.CONNECTED
        assert lost is (ResumeState.BROKEN if connected else ResumeState.ENDED)

    @pytest.mark.parametrize("state", ResumeState)
    def test_broken_stream_alone_is_resumed(self, state: ResumeState) -> None:
        assert (after(state, ResumeEvent.RESUME) is not state) == (state in BROKEN)
        assert after(state, ResumeEvent.RESUME) not in BROKEN

    @pytest.mark.parametrize("state", ResumeState)
    def test_loss_or_replacement_alone_breaks_stream(self, state: ResumeState) -> None:
        for event in set(ResumeEvent) - {ResumeEvent.LOSE, ResumeEvent.REPLACE}:
            assert state in BROKEN or after(state, event) not in BROKEN

    @pytest.mark.parametrize("state", ResumeState)
    @pytest.mark.parametrize("event", [ResumeEvent.CLOSE, ResumeEvent.PEER_CLOSE])
    def test_closed_stream_ends_with_its_transport(
        self, state: ResumeState, event: ResumeEvent
    ) -> None:
        for more in ResumeEvent:
            closed = after(state, event, more)
            if closed not in BROKEN:
                assert after(closed, ResumeEvent.LOSE) is ResumeState.ENDED

    @pytest.mark.parametrize("state", BROKEN)
    def test_broken_stream_that_is_closed_is_not_resumed(
        self, state: ResumeState
    ) -> None:
        for event in (ResumeEvent.CLOSE, ResumeEvent.PEER_CLOSE):
            closed = after(state, event)
            assert closed in OVER
            assert after(closed, ResumeEvent.RESUME) is closed


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
