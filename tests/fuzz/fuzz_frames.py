"""Frames: no bytes get more out of a reader than messages, or a protocol error.

The first byte says what the rest is: a stream as it is, or choices from which frames
are made that are sound but for some number.  The stream is read twice, in one piece and
in pieces of other lengths: both must give the same messages, and the same error.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from asyncrpc.core.wire.frames import (
    HEADER,
    INLINE_BYTES_MAX,
    MAGIC,
    VERSION,
    BufferRow,
    Flags,
    FrameKind,
    data_prefix,
    placed_prefix,
    prefix,
)
from asyncrpc.core.wire.limits import MessageLimits
from asyncrpc.core.wire.reader import SCRATCH_BYTES, FrameReader
from asyncrpc.errors import MalformedError, RemoteProtocolError
from tests.fuzz.choices import Choices

LIMITS = MessageLimits(
    control_bytes_max=1 << 12,
    payload_bytes_max=INLINE_BYTES_MAX + (4 << 10),
    buffers_max=64,
    transfers_max=4,
)
SLAB = memoryview(bytearray(1 << 12))
ALIGNED_BYTES_MAX = 64 * LIMITS.buffers_max  # what padding adds to a message
LONGEST_BYTES = SCRATCH_BYTES + (1 << 17)

Message = tuple[int, int, int, int, bytes, bytes, tuple[bytes, ...]]


@dataclass
class Sink:
    """Keeps what arrives, and sees to it that no more is allocated than may be."""

    events: list[Message | tuple[int, int]] = field(default_factory=list)

    def on_message(self, *message: object) -> None:
        *rest, buffers = message
        assert isinstance(buffers, list)
        self.events.append((*rest, tuple(map(bytes, buffers))))  # type: ignore[arg-type]

    def on_transfer_dropped(self, kind: int, call_id: int) -> None:
        self.events.append((kind, call_id))

    def allocate(
        self, kind: int, call_id: int, lengths: Sequence[int]
    ) -> list[memoryview]:
        assert len(lengths) <= LIMITS.buffers_max
        assert sum(lengths) <= LIMITS.payload_bytes_max + ALIGNED_BYTES_MAX
        return [memoryview(bytearray(length)) for length in lengths]


def place(location: int, length: int) -> memoryview:
    """Find a buffer in shared memory; there are 4 KiB of it."""
    if location + length > len(SLAB):
        raise MalformedError("outside")
    return SLAB[location : location + length]


def read(stream: bytes, pieces: Sequence[int]) -> tuple[list[object], str]:
    """Feed a stream, in pieces of these lengths, over and over; return what came."""
    sink = Sink()
    reader = FrameReader(sink, sink.allocate, LIMITS)
    reader.places = place
    view, turn = memoryview(stream), 0
    try:
        while view:
            memory = reader.get_buffer()
            assert 1 <= memory.nbytes <= LONGEST_BYTES
            nbytes = min(memory.nbytes, len(view), pieces[turn % len(pieces)])
            memory[:nbytes] = view[:nbytes]
            view, turn = view[nbytes:], turn + 1
            reader.advance(nbytes)
            assert len(reader.arrivals) <= LIMITS.transfers_max
    except RemoteProtocolError as error:
        return list(sink.events), type(error).__name__
    return list(sink.events), ""


def stream_of(choices: Choices) -> bytes:
    """Make frames; the last may be cut."""
    stream = bytearray()
    while choices and len(stream) < 1 << 18:
        stream += frame_of(choices)
    return bytes(stream)


def frame_of(choices: Choices) -> bytes:
    how = choices.below(8)
    kind, call_id = choices.below(len(FrameKind) + 2), choices.below(4)
    if how == 0:
        return data_prefix(call_id, choices.signed(), choices.number())
    if how == 1:  # a chunk of a deferred payload, whole
        nbytes = choices.below(256) * 16
        start = choices.below(64) * 1024
        return data_prefix(call_id, start, nbytes) + bytes(nbytes)
    if how == 2:
        return prefix(FrameKind.DROP, call_id, aux=choices.below(64) * 1024)
    head, control = choices.take(choices.below(8)), choices.take(choices.below(8))
    if how == 3:
        entries = [
            BufferRow(choices.below(256), (-1, 0, 4000, 1 << 40)[choices.below(4)])
            for _ in range(choices.below(4))
        ]
        payload = sum(entry.length for entry in entries if entry.location < 0)
        return placed_prefix(
            kind, call_id, flags=0, aux=0, head=head, control=control, entries=entries
        ) + bytes(payload)
    lengths = [choices.number() & 0xFFFFF for _ in range(choices.below(4))]
    flags = choices.below(16)
    if how == 4:  # whatever the numbers, they are in a header
        return HEADER.pack(
            *(MAGIC, VERSION, kind, flags, len(head)),
            *(choices.number() & 0xFFFF_FFFF, choices.number() & 0xFFFF_FFFF),
            *(choices.signed(), call_id, choices.number()),
        ) + struct.pack("<3Q", choices.number(), 0, 0)
    opening = prefix(
        kind,
        call_id,
        flags=flags,
        aux=choices.signed(),
        head=head,
        control=control,
        lengths=lengths,
        payload_bytes=sum(lengths),
    )
    is_inline = not flags & Flags.DEFERRED
    return opening + bytes(min(sum(lengths), 1 << 17) if is_inline else 0)


def check(data: bytes) -> None:
    """Read a stream twice, and compare."""
    choices = Choices(data)
    how = choices.below(2)
    pieces = [1 + choices.below(256) for _ in range(1 + choices.below(3))]
    stream = stream_of(choices) if how else bytes(choices.left)
    if len(stream) > 1 << 12:
        pieces = [97 * piece for piece in pieces]
    assert read(stream, [1 << 30]) == read(stream, pieces)


def seeds() -> Iterator[bytes]:
    """Give streams that are sound."""
    small = prefix(FrameKind.REQUEST, 1, aux=-1, head=b"\x92\x01\xc0", control=b"\xc0")
    inline = prefix(
        FrameKind.RESPONSE, 2, control=b"\xc0", lengths=[3, 5], payload_bytes=8
    ) + bytes(8)
    size = 66_000
    deferred = (
        prefix(3, 3, flags=Flags.DEFERRED, lengths=[size], payload_bytes=size)
        + data_prefix(1, 0, size)
        + bytes(64)
    )
    entries = [BufferRow(8, 16), BufferRow(2, -1)]
    placed = placed_prefix(
        2, 4, flags=0, aux=0, head=b"\x90", control=b"", entries=entries
    )
    for stream in (small, inline, deferred, placed + b"ab", small + inline + small):
        yield b"\x00\x00\x20" + stream
    for first in range(8):
        yield bytes([1, 0, 7, *([first, 2, 1, 3, 1, 2, 3, 4] * 8)])
