"""Messages whose buffers lie in shared memory: what the reader finds, and refuses."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrpc.core.wire.frames import HEADER, INLINE_BYTES_MAX, Flags, FrameKind, prefix
from asyncrpc.core.wire.placed import BufferRow, placed_prefix
from asyncrpc.core.wire.reader import FrameReader
from asyncrpc.errors import FrameTooLargeError, MalformedError, RemoteProtocolError
from tests.unit.core.wire.recorder import Recorder, feed

SLAB = bytearray(b"0123456789" * 100)
REQUEST = int(FrameKind.REQUEST)


def place(location: int, nbytes: int) -> memoryview:
    """Find memory in slab 3."""
    start = location & 0xFFFF
    if location >> 48 != 3 or start + nbytes > len(SLAB):
        raise MalformedError("it is in no slab")
    return memoryview(SLAB)[start : start + nbytes]


def reader_of(sink: Recorder, *, with_places: bool = True) -> FrameReader:
    reader = FrameReader(sink, sink.allocate)
    reader.places = place if with_places else None
    return reader


def at(offset: int) -> int:
    return 3 << 48 | offset


def frame(*entries: BufferRow, kind: int = REQUEST, inline: bytes = b"") -> bytes:
    opening = placed_prefix(
        kind, 7, flags=0, aux=-1, head=b"h", control=b"c", entries=entries
    )
    return opening + inline


MIXED = frame(BufferRow(4, at(2)), BufferRow(3, -1), BufferRow(5, at(0)), inline=b"abc")


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_placed_buffers_are_found_and_others_read(step: int) -> None:
    sink = Recorder()
    reader = reader_of(sink)
    after = prefix(FrameKind.PING, 9)
    feed(reader, MIXED + after, (step,))
    first, second = sink.messages
    assert first.buffers == (b"2345", b"abc", b"01234")
    assert (first.head, first.control, first.call_id) == (b"h", b"c", 7)
    assert second.kind == FrameKind.PING
    assert reader.bytes_copied == 3


def test_placed_message_without_shared_memory_is_refused() -> None:
    with pytest.raises(MalformedError, match="no memory is shared"):
        feed(reader_of(Recorder(), with_places=False), MIXED)


def tampered(index: int, value: int) -> bytes:
    """Change one number of the table of a frame with one buffer in a slab."""
    whole = bytearray(frame(BufferRow(4, at(2))))
    struct.pack_into("<Q", whole, HEADER.size + 2 + 8 * index, value)
    return bytes(whole)


def misstated() -> bytes:
    """Say in the header that there is one byte more than in the table."""
    whole = bytearray(frame(BufferRow(3, -1), inline=b"abcd"))
    struct.pack_into("<Q", whole, 32, 4)
    return bytes(whole)


@pytest.mark.parametrize(
    "stream",
    [
        tampered(0, 2 << 56 | 4),
        tampered(0, 4),
        tampered(1, at(len(SLAB))),
        tampered(1, 4 << 48),
        misstated(),
        frame(BufferRow(4, at(0)), kind=FrameKind.PING),
        frame(BufferRow(4, at(0)), kind=FrameKind.GOODBYE),
        prefix(REQUEST, 1, flags=Flags.PLACED, payload_bytes=5) + bytes(5),
        prefix(REQUEST, 1, flags=Flags.PLACED | Flags.DEFERRED, lengths=(5,)),
        frame(BufferRow(INLINE_BYTES_MAX + 1, -1)),
    ],
    ids=[
        "another placement",
        "inline with a location",
        "behind the end",
        "another slab",
        "does not add up",
        "a PING",
        "a GOODBYE",
        "a payload without a buffer",
        "deferred, too",
        "too much inline",
    ],
)
def test_placed_message_that_breaks_the_protocol_is_refused(stream: bytes) -> None:
    sink = Recorder()
    with pytest.raises(RemoteProtocolError):
        feed(reader_of(sink), stream)
    assert not sink.messages


def test_number_of_buffers_is_limited() -> None:
    header = bytearray(frame(BufferRow(4, at(0)))[: HEADER.size])
    struct.pack_into("<I", header, 12, 1 << 30)
    with pytest.raises(FrameTooLargeError):
        feed(reader_of(Recorder()), bytes(header))


@given(
    position=st.integers(0, len(MIXED) - 1),
    byte=st.integers(0, 255),
    step=st.integers(1, 99),
)
def test_changed_byte_gives_a_message_or_a_protocol_error(
    position: int, byte: int, step: int
) -> None:
    stream = bytearray(MIXED)
    stream[position] = byte
    sink = Recorder()
    try:
        feed(reader_of(sink), bytes(stream), (step,))
    except RemoteProtocolError:
        assert not sink.messages
