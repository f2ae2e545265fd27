"""Messages go at once; payloads in turns, and only as far as they are wanted."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest

from asyncrpc.wire import outbox as module
from asyncrpc.wire.frames import (
    HEADER,
    HEADER_BYTES,
    Flags,
    FrameKind,
    data_prefix,
    prefix,
)
from asyncrpc.wire.outbox import Outbox

REQUEST, RESPONSE, ITEM = FrameKind.REQUEST, FrameKind.RESPONSE, FrameKind.STREAM_ITEM


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INLINE_BYTES_MAX", 8)
    monkeypatch.setattr(module, "JOIN_BYTES_MAX", 4)
    monkeypatch.setattr(module, "CHUNK_BYTES", 10)


def views(*texts: bytes) -> list[memoryview]:
    return [memoryview(text) for text in texts]


def opening(kind: int, call_id: int, *lengths: int) -> bytes:
    flags = Flags.DEFERRED if sum(lengths) > 8 else 0
    total = sum(lengths)
    return prefix(kind, call_id, flags=flags, lengths=lengths, payload_bytes=total)


def joined(parts: Sequence[bytes | memoryview]) -> bytes:
    return b"".join(parts)


class TestMessage:
    def test_without_buffers_is_one_piece(self) -> None:
        parts = Outbox().message(REQUEST, 1, flags=2, aux=3, head=b"h", control=b"c")
        assert parts == (prefix(REQUEST, 1, flags=2, aux=3, head=b"h", control=b"c"),)

    def test_a_little_payload_is_joined_to_it(self) -> None:
        parts = Outbox().message(REQUEST, 1, buffers=views(b"ab", b"", b"cd"))
        assert parts == (opening(REQUEST, 1, 2, 0, 2) + b"abcd",)

    def test_more_is_not_copied(self) -> None:
        payload = views(b"abc", b"defgh")
        head, *rest = Outbox().message(REQUEST, 1, buffers=payload)
        assert head == opening(REQUEST, 1, 3, 5)
        assert all(one is other for one, other in zip(rest, payload, strict=True))

    def test_a_large_payload_waits(self) -> None:
        outbox = Outbox()
        parts = outbox.message(REQUEST, 1, flags=Flags.STREAM, buffers=views(b"x" * 9))
        header = HEADER.unpack(joined(parts)[:HEADER_BYTES])
        assert header[3] == Flags.STREAM | Flags.DEFERRED
        assert len(joined(parts)) == HEADER_BYTES + 8
        assert outbox


class TestChunks:
    def test_are_cut_without_a_copy(self) -> None:
        payload = b"0123456789abcdefghijklmno"
        outbox = Outbox()
        outbox.message(REQUEST, 1, buffers=views(payload[:4], b"", payload[4:]))
        first = outbox.next_chunk()
        assert first[0] == data_prefix(REQUEST, 1, 0, 10)
        assert [piece.obj for piece in first[1:] if isinstance(piece, memoryview)] == [
            payload[:4],
            payload[4:],
        ]
        assert joined(first[1:]) == payload[:10]
        assert joined(outbox.next_chunk()) == (
            data_prefix(REQUEST, 1, 10, 10) + payload[10:20]
        )
        assert joined(outbox.next_chunk()) == (
            data_prefix(REQUEST, 1, 20, 5) + payload[20:]
        )
        assert not outbox
        assert outbox.next_chunk() == []

    def test_transfers_take_turns(self) -> None:
        outbox = Outbox()
        for call_id in (1, 2, 3):
            outbox.message(REQUEST, call_id, buffers=views(bytes(20)))
        turns = []
        while outbox:
            header = HEADER.unpack(outbox.next_chunk()[0])
            turns.append((header[8], header[7]))  # call id and offset
        assert turns == [(1, 0), (2, 0), (3, 0), (1, 10), (2, 10), (3, 10)]

    def test_transfers_of_one_call_follow_each_other(self) -> None:
        """The reader could not tell their bytes apart."""
        outbox = Outbox()
        assert outbox.message(ITEM, 1, buffers=views(b"a" * 15))
        assert outbox.message(ITEM, 1, buffers=views(b"b" * 9)) == ()
        stream = [joined(outbox.next_chunk()) for _ in range(3)]
        assert stream == [
            data_prefix(ITEM, 1, 0, 10) + b"a" * 10,
            data_prefix(ITEM, 1, 10, 5) + b"a" * 5,
            opening(ITEM, 1, 9) + data_prefix(ITEM, 1, 0, 9) + b"b" * 9,
        ]
        assert not outbox


class TestDrop:
    def test_tells_the_peer_of_what_it_has_heard(self) -> None:
        outbox = Outbox()
        outbox.message(REQUEST, 1, buffers=views(bytes(20)))
        outbox.message(RESPONSE, 1, buffers=views(bytes(9)))
        outbox.next_chunk()
        assert outbox.drop(REQUEST, 1) == (prefix(FrameKind.DROP, 1, flags=REQUEST),)
        assert outbox.drop(REQUEST, 1) is None
        assert joined(outbox.next_chunk())[:HEADER_BYTES] == data_prefix(
            RESPONSE, 1, 0, 9
        )
        assert not outbox

    def test_says_nothing_of_what_it_has_not_heard(self) -> None:
        outbox = Outbox()
        outbox.message(ITEM, 1, buffers=views(bytes(9)))
        outbox.message(ITEM, 1, buffers=views(bytes(9)))
        outbox.next_chunk()
        assert outbox.drop(ITEM, 1) == ()
        assert not outbox

    def test_takes_all_that_wait_behind_it(self) -> None:
        outbox = Outbox()
        for _ in range(3):
            outbox.message(ITEM, 1, buffers=views(bytes(9)))
        assert len(outbox.drop(ITEM, 1) or ()) == 1
        assert not outbox
        assert outbox.message(ITEM, 1, buffers=views(bytes(9)))  # from the beginning


class TestOnSent:
    @pytest.mark.parametrize("payload", [(), (b"ab",), (b"abcdef",)])
    def test_is_called_at_once_for_what_is_returned_whole(
        self, payload: tuple[bytes, ...]
    ) -> None:
        sent: list[int] = []
        Outbox().message(
            REQUEST, 1, buffers=views(*payload), on_sent=lambda: sent.append(1)
        )
        assert sent == [1]

    def test_is_called_with_the_last_chunk(self) -> None:
        sent: list[int] = []
        outbox = Outbox()
        outbox.message(
            REQUEST, 1, buffers=views(bytes(20)), on_sent=lambda: sent.append(1)
        )
        outbox.next_chunk()
        assert sent == []
        outbox.next_chunk()
        assert sent == [1]

    @pytest.mark.parametrize("how", ["drop", "clear"])
    def test_is_called_once_for_what_is_given_up(self, how: str) -> None:
        sent: list[int] = []
        outbox = Outbox()
        for serial in range(3):
            outbox.message(
                ITEM,
                1,
                buffers=views(bytes(9)),
                on_sent=partial(sent.append, serial),
            )
        outbox.message(ITEM, 1, buffers=views(bytes(9)))
        outbox.next_chunk()
        assert sent == [0]
        for _ in range(2):
            if how == "drop":
                outbox.drop(ITEM, 1)
            else:
                outbox.clear()
        assert sent == [0, 1, 2]
        assert not outbox
        assert outbox.next_chunk() == []

    def test_finds_the_outbox_without_it(self) -> None:
        """Whoever is told may give up another transfer."""
        outbox = Outbox()
        outbox.message(
            ITEM, 1, buffers=views(bytes(9)), on_sent=lambda: drops.append(drop())
        )
        outbox.message(ITEM, 1, buffers=views(bytes(9)))

        def drop() -> object:
            return outbox.drop(ITEM, 1)

        drops: list[object] = []
        outbox.next_chunk()
        assert drops == [()]
        assert not outbox
