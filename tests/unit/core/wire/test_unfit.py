"""What there is no memory for: it is read, thrown away, and said so; the next is fine.

What stands for its control part, here, is the text of the problem itself.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Sequence
from typing import Any

import pytest

from asyncrpc.core.host.shortage import MORE_MEMORY
from asyncrpc.core.wire import chunks as chunks_module
from asyncrpc.core.wire import reader as reader_module
from asyncrpc.core.wire.chunks import ChunkScheduler, LaneReader
from asyncrpc.core.wire.frames import (
    CHUNK_BYTES,
    HEADER_BYTES,
    BufferRow,
    Flags,
    FrameKind,
    data_prefix,
    placed_prefix,
    prefix,
)
from asyncrpc.core.wire.outgoing import OutgoingMessage
from asyncrpc.core.wire.reader import (
    SCRATCH_BYTES,
    UNASKED_CONTROL_BYTES_MAX,
    WAITING_BYTES_MAX,
    FrameReader,
)
from asyncrpc.errors import FrameTooLargeError, MalformedError
from tests.unit.core.wire.recorder import Message, Recorder, feed

REQUEST, RESPONSE = FrameKind.REQUEST, FrameKind.RESPONSE
PING = prefix(FrameKind.PING, 9)
PINGED = Message(FrameKind.PING, 0, 9, 0, b"", b"")
PIECES = [(1 << 30,), (1,), (39,), (40, 41), (SCRATCH_BYTES,)]
SMALL = 10  # bytes of a chunk in some tests
LONG = b"c" * (2 * SCRATCH_BYTES)  # a control part that needs a longer scratch buffer


def frugal(sink: Recorder) -> FrameReader:
    """Return a reader that tells of what it has no memory for."""
    reader = sink.reader()
    reader.unreadable = str.encode
    return reader


def stand_in(nbytes: int, kind: int = REQUEST) -> Message:
    """Return what stands for a message of call 1 whose head is `head`."""
    problem = (
        f"this worker has no memory for a message of {nbytes} bytes: {MORE_MEMORY}"
    )
    return Message(kind, 0, 1, 7, b"head", problem.encode())


def deferred(
    nbytes: int,
    *,
    control: bytes = b"",
    kind: int = REQUEST,
    size: int = CHUNK_BYTES,
) -> bytes:
    """Return a message with a payload that follows, the first of its connection."""
    opening = prefix(
        kind,
        1,
        flags=Flags.DEFERRED,
        aux=7,
        head=b"head",
        control=control,
        lengths=(nbytes,),
        payload_bytes=nbytes,
    )
    lengths = [(at, min(size, nbytes - at)) for at in range(0, nbytes, size)]
    return opening + b"".join(
        data_prefix(1, at, length) + bytes(length) for at, length in lengths
    )


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks_module, "CHUNK_BYTES", SMALL)


@pytest.fixture
def short_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system gives no scratch buffer that is longer than the first."""

    def give(nbytes: int) -> mmap.mmap:
        if nbytes > SCRATCH_BYTES:
            raise OSError(12, "Cannot allocate memory")
        return mmap.mmap(-1, nbytes)

    monkeypatch.setattr(reader_module, "_scratch", give)


class TestPayloadsThatAreNotWanted:
    @pytest.mark.parametrize("kind", [RESPONSE, FrameKind.NOTICE])
    def test_unwanted_payload_is_discarded_and_its_message_delivered(
        self, kind: int
    ) -> None:
        sink = Recorder()
        reader = sink.reader()
        reader.on_unasked = lambda *_: False
        feed(reader, deferred(1001, control=b"control", kind=kind) + PING)
        assert [message.kind for message in sink.messages] == [kind, FrameKind.PING]
        assert sink.allocated == []
        assert not len(reader.arrivals)

    @pytest.mark.parametrize("kind", [FrameKind.SERVICE, FrameKind.NOTICE])
    def test_control_part_of_service_message_has_its_own_limit(self, kind: int) -> None:
        sink = Recorder()
        too_long = bytearray(prefix(kind, 1, control=b"")[:HEADER_BYTES])
        struct.pack_into("<I", too_long, 8, UNASKED_CONTROL_BYTES_MAX + 1)
        with pytest.raises(FrameTooLargeError, match="the limit is 16777216"):
            feed(sink.reader(), bytes(too_long))

    def test_messages_that_wait_for_payloads_are_limited(self) -> None:
        reader = Recorder().reader()
        control = bytes(WAITING_BYTES_MAX // 3)

        def announced(call_id: int) -> bytes:
            return prefix(
                RESPONSE,
                call_id,
                flags=Flags.DEFERRED,
                control=control,
                lengths=(1001,),
                payload_bytes=1001,
            )

        feed(reader, announced(1) + announced(2))
        with pytest.raises(FrameTooLargeError, match="wait for their payloads"):
            feed(reader, announced(3))


class TestPayloads:
    @pytest.mark.parametrize("at_most", PIECES)
    @pytest.mark.parametrize("nbytes", [11, SCRATCH_BYTES * 3 + 5])
    def test_unfit_deferred_payload_is_discarded(
        self, nbytes: int, at_most: Sequence[int]
    ) -> None:
        sink = Recorder(allocated_max=10)
        reader = frugal(sink)
        steps = (max(step, nbytes // 500) for step in at_most)
        feed(reader, PING + deferred(nbytes) + PING, at_most=tuple(steps))
        assert sink.messages == [PINGED, stand_in(nbytes), PINGED]
        assert not len(reader.arrivals)

    def test_unfit_inline_payload_is_discarded(self) -> None:
        sink = Recorder(allocated_max=10)
        inline = prefix(
            REQUEST, 1, aux=7, head=b"head", lengths=(11,), payload_bytes=11
        )
        feed(frugal(sink), inline + bytes(11) + PING)
        assert sink.messages == [stand_in(11), PINGED]

    def test_unfit_payload_over_lanes_is_discarded(self) -> None:
        sink = Recorder(allocated_max=10)
        reader = frugal(sink)
        chunks = ChunkScheduler(lambda _: None)
        payload = memoryview(bytes(25))
        message = OutgoingMessage(REQUEST, 1, aux=7, head=b"head", buffers=[payload])
        feed(reader, chunks.add(message, over_lanes=True)[1])
        assert sink.messages == [stand_in(25)]
        lane = LaneReader(reader.arrivals)
        while chunks:
            feed(lane, b"".join(chunks.next_chunk()))
        assert not len(reader.arrivals)
        assert len(sink.messages) == 1

    @pytest.mark.usefixtures("small_chunks")
    def test_unfit_payload_may_be_dropped_by_the_peer(self) -> None:
        sink = Recorder(allocated_max=10)
        reader = frugal(sink)
        cut = deferred(20, size=SMALL)[: -(SMALL + HEADER_BYTES)]
        feed(reader, cut + prefix(FrameKind.DROP, 1, aux=10) + PING)
        assert sink.messages == [stand_in(20), PINGED]
        assert not len(reader.arrivals)

    def test_unfit_payload_may_be_moved(self) -> None:
        sink = Recorder(allocated_max=10)
        reader = frugal(sink)
        whole = deferred(20, kind=RESPONSE)
        feed(reader, whole[:-3])
        reader.arrivals.move(RESPONSE, 1, lambda nbytes: memoryview(bytearray(nbytes)))
        feed(reader, whole[-3:] + PING)
        assert sink.messages[-1] == PINGED
        assert not len(reader.arrivals)

    @pytest.mark.usefixtures("small_chunks")
    def test_repeated_chunk_of_an_unfit_payload_is_refused(self) -> None:
        reader = frugal(Recorder(allocated_max=10))
        feed(reader, deferred(20, size=SMALL)[: -(SMALL + HEADER_BYTES)])
        with pytest.raises(MalformedError, match="twice"):
            feed(reader, data_prefix(1, 0, 10))


@pytest.mark.usefixtures("short_scratch")
class TestControlParts:
    @pytest.mark.parametrize("at_most", [(1 << 30,), (40, 41), (SCRATCH_BYTES,)])
    def test_unfit_control_part_is_discarded(self, at_most: Sequence[int]) -> None:
        sink = Recorder()
        stream = prefix(REQUEST, 1, aux=7, head=b"head", control=LONG)
        feed(frugal(sink), PING + stream + PING + stream + PING, at_most=at_most)
        expected = stand_in(len(LONG))
        assert sink.messages == [PINGED, expected, PINGED, expected, PINGED]

    @pytest.mark.parametrize("first", [39, 40, 41, 44, 45])
    def test_unfit_message_header_may_come_in_pieces(self, first: int) -> None:
        for head in (b"", b"head"):
            sink = Recorder()
            stream = prefix(REQUEST, 1, aux=7, head=head, control=LONG)
            feed(frugal(sink), stream + PING, at_most=(first, 1 << 30))
            assert [message.head for message in sink.messages] == [head, b""]
            assert sink.messages[-1] == PINGED

    @pytest.mark.parametrize("allocated_max", [10, 1 << 30])
    def test_unfit_control_part_discards_its_payload(self, allocated_max: int) -> None:
        sink = Recorder(allocated_max=allocated_max)
        reader = frugal(sink)
        begun: list[Any] = []
        reader.on_request = lambda *request: begun.append(request)
        feed(reader, deferred(1001, control=LONG) + PING)
        expected = stand_in(len(LONG) + 1001)
        assert (sink.messages, sink.allocated) == ([expected, PINGED], [])
        assert begun == [(1, b"", len(LONG), (1001,))]
        assert not len(reader.arrivals)

    def test_unfit_control_part_discards_its_inline_buffers(self) -> None:
        sink = Recorder()
        stream = prefix(
            REQUEST, 1, aux=7, head=b"head", control=LONG, lengths=(3,), payload_bytes=3
        )
        feed(frugal(sink), stream + b"abc" + PING)
        assert sink.messages == [stand_in(len(LONG) + 3), PINGED]

    def test_unfit_message_that_holds_shared_memory_ends_the_connection(self) -> None:
        """What the message names in it could never be given back."""
        reader = frugal(Recorder())
        reader.places = lambda _location, nbytes: memoryview(bytearray(nbytes))
        stream = placed_prefix(
            REQUEST,
            1,
            flags=0,
            aux=0,
            head=b"h",
            control=LONG,
            entries=[BufferRow(5, 0)],
        )
        with pytest.raises(FrameTooLargeError, match="no memory for"):
            feed(reader, stream)

    def test_unfit_message_without_a_handler_ends_the_connection(self) -> None:
        with pytest.raises(FrameTooLargeError, match="no memory for"):
            feed(Recorder().reader(), prefix(REQUEST, 1, control=LONG))


def test_long_scratch_buffer_is_kept_if_no_short_one_is_available(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sink = Recorder()
    reader = frugal(sink)
    feed(reader, prefix(REQUEST, 1, control=LONG))

    def refuse(nbytes: int) -> mmap.mmap:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(reader_module, "_scratch", refuse)
    feed(reader, PING)
    assert sink.messages[1:] == [PINGED]
