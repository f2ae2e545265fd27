"""Whatever is sent comes out of a reader; whatever else comes is refused.

Hypothesis sends messages, takes chunks, gives transfers up, and cuts the stream where
it likes.  A message has arrived when its last byte has, so the order in which last
bytes are written is the order of arrival, exactly.  Most of it runs with limits of a
few bytes, which puts every case within reach; some of it with the real ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrpc.core.wire import chunks as chunks_module
from asyncrpc.core.wire import reader as reader_module
from asyncrpc.core.wire.chunks import ChunkScheduler, OutgoingTransfer
from asyncrpc.core.wire.frames import (
    HEADER,
    HEADER_BYTES,
    INLINE_BYTES_MAX,
    VERSION,
    FrameKind,
    Hello,
    prefix,
    unpack_head,
)
from asyncrpc.core.wire.handshake import Handshake, HandshakeState, Role
from asyncrpc.core.wire.limits import MessageLimits
from asyncrpc.core.wire.outgoing import (
    OutgoingEvent,
    OutgoingMessage,
    OutgoingMessages,
    OutgoingState,
)
from asyncrpc.errors import (
    AuthenticationError,
    FrameTooLargeError,
    MalformedError,
    VersionMismatchError,
)
from tests.unit.core.wire.recorder import WITH_VALUE, Message, Recorder, feed

SMALL_INLINE_BYTES_MAX = 32
SMALL_SCRATCH_BYTES = 128
WITHOUT_VALUE = sorted({*FrameKind} - {FrameKind.DATA, FrameKind.DROP})


@contextmanager
def small_limits() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader_module, "INLINE_BYTES_MAX", SMALL_INLINE_BYTES_MAX)
        patch.setattr(chunks_module, "CHUNK_BYTES", 24)
        patch.setattr(reader_module, "SCRATCH_BYTES", SMALL_SCRATCH_BYTES)
        yield


class Sender:
    """A scheduler, the stream of lane 0, and what is to be expected of that."""

    def __init__(self, inline_bytes_max: int) -> None:
        self.outgoing = OutgoingMessages()
        self.chunks = ChunkScheduler(self.outgoing.sent)
        self.stream = bytearray()
        self.expected: list[Message] = []
        self.dropped: list[tuple[int, int]] = []
        self._inline_bytes_max = inline_bytes_max

    def send(self, message: Message) -> None:
        kind, flags, call_id, aux, head, control, payload = message
        lengths = [len(buffer) for buffer in payload]
        if sum(lengths) <= self._inline_bytes_max:
            self.stream += prefix(
                kind,
                call_id,
                flags=flags,
                aux=aux,
                head=head,
                control=control,
                lengths=lengths,
                payload_bytes=sum(lengths),
            )
            self.stream += b"".join(payload)
            self.expected.append(message)
            return
        sent = OutgoingMessage(
            kind,
            call_id,
            flags=flags,
            aux=aux,
            head=head,
            control=control,
            buffers=[memoryview(buffer) for buffer in payload],
        )
        sent.on_sent = partial(self._on_end, sent, message)
        transfer, opening = self.chunks.add(sent, over_lanes=False)
        self.outgoing.wait(
            sent, OutgoingEvent.QUEUE, partial(self._take_back, transfer)
        )
        self.stream += opening

    def _on_end(self, sent: OutgoingMessage, message: Message) -> None:
        if sent.state is OutgoingState.SENT:
            self.expected.append(message)
        else:
            self.dropped.append((message.kind, message.call_id))

    def _take_back(self, transfer: OutgoingTransfer) -> None:
        self.stream += self.chunks.remove(transfer)

    def send_chunk(self) -> None:
        if self.chunks:
            self.stream += b"".join(self.chunks.next_chunk())

    def drain(self) -> None:
        while self.chunks:
            self.send_chunk()
        assert not len(self.outgoing)


def payloads(sizes: st.SearchStrategy[int]) -> st.SearchStrategy[tuple[bytes, ...]]:
    seeds = st.integers(0, 1 << 30)
    buffer = st.builds(lambda seed, n: random.Random(seed).randbytes(n), seeds, sizes)
    return st.lists(buffer, min_size=1, max_size=4).map(tuple)


def messages(sizes: st.SearchStrategy[int]) -> st.SearchStrategy[Message]:
    fields = {
        "flags": st.sampled_from([0, 2, 1 << 15]),
        "call_id": st.integers(0, 2) | st.integers(0, (1 << 64) - 1),
        "aux": st.integers(-(1 << 63), (1 << 63) - 1),
        "head": st.binary(max_size=40),
        "control": st.binary(max_size=2 * SMALL_SCRATCH_BYTES),
    }
    bare, rich = st.sampled_from(WITHOUT_VALUE), st.sampled_from(WITH_VALUE)
    none = st.just(())
    return st.builds(Message, kind=bare, buffers=none, **fields) | st.builds(
        Message, kind=rich, buffers=payloads(sizes), **fields
    )


def actions(sizes: st.SearchStrategy[int]) -> st.SearchStrategy[list[object]]:
    """Messages to send, None for a chunk, keys of transfers to give up."""
    keys = st.tuples(st.sampled_from(WITH_VALUE), st.integers(0, 2))
    return st.lists(messages(sizes) | st.none() | keys, max_size=20)


def perform(
    script: list[object], inline_bytes_max: int = SMALL_INLINE_BYTES_MAX
) -> Sender:
    sender = Sender(inline_bytes_max)
    for action in script:
        match action:
            case Message():
                sender.send(action)
            case (int(kind), int(call_id)):
                sender.outgoing.drop(kind, call_id)
            case _:
                sender.send_chunk()
    sender.drain()
    return sender


CUTS = st.lists(st.integers(1, 64) | st.integers(1, 1 << 20), max_size=8)
SMALL_SIZES = st.integers(0, 3 * SMALL_INLINE_BYTES_MAX)
REAL_SIZES = st.sampled_from([0, 1, 100, 40_000, 65_536, 65_537, 600_000])


@given(script=actions(SMALL_SIZES), cuts=CUTS)
@settings(deadline=None, max_examples=150)
def test_stream_arrives_as_it_was_sent(script: list[object], cuts: list[int]) -> None:
    with small_limits():
        sender = perform(script)
        sink = Recorder()
        reader = sink.reader()
        feed(reader, bytes(sender.stream), cuts)
    assert sink.messages == sender.expected
    assert sink.dropped == sender.dropped
    assert not len(reader.arrivals)


@given(script=actions(REAL_SIZES), cuts=CUTS.filter(lambda cuts: sum(cuts) > 1000))
@settings(deadline=None, max_examples=15)
def test_stream_of_real_size_arrives_as_it_was_sent(
    script: list[object], cuts: list[int]
) -> None:
    sender = perform(script, INLINE_BYTES_MAX)
    sink = Recorder()
    feed(sink.reader(), bytes(sender.stream), cuts)
    assert sink.messages == sender.expected
    assert sink.dropped == sender.dropped


@given(script=actions(SMALL_SIZES))
@settings(deadline=None, max_examples=50)
def test_reader_that_asks_is_never_given_a_stray(script: list[object]) -> None:
    """Once a payload is under way all of it lands in place, but for one first read."""
    with small_limits():
        sender = perform(script)
        sink = Recorder()
        reader = sink.reader()
        feed(reader, bytes(sender.stream), at_most=(1,))
    inline = sum(
        total
        for message in sender.expected
        if (total := sum(map(len, message.buffers))) <= SMALL_INLINE_BYTES_MAX
    )
    assert reader.bytes_copied == inline


# --- what nobody would send ----------------------------------------------------------

LIMITS = MessageLimits(
    control_bytes_max=300, payload_bytes_max=500, buffers_max=6, transfers_max=3
)
# One frame: header, head, control part, table, inline payload.
SCRATCH_BYTES_MAX = HEADER_BYTES + 0xFFFF + 300 + 6 * 8 + SMALL_INLINE_BYTES_MAX
# One inline message, padded; an inline payload is copied, a deferred one lands.
ALLOCATED_BYTES_MAX = 500 + 6 * reader_module.ALIGNMENT


def check_hostile(stream: bytes, cuts: list[int]) -> None:
    """Feed anything: it is refused with an error of its own kind, or taken in."""
    with small_limits():
        sink = Recorder()
        reader = sink.reader(LIMITS)
        with suppress(FrameTooLargeError, MalformedError, VersionMismatchError):
            feed(reader, stream, cuts)
        assert reader.get_buffer().nbytes <= SCRATCH_BYTES_MAX
    assert max(sink.allocated, default=0) <= ALLOCATED_BYTES_MAX
    assert len(reader.arrivals) <= LIMITS.transfers_max


@given(stream=st.binary(max_size=300), cuts=CUTS)
def test_garbage_is_refused(stream: bytes, cuts: list[int]) -> None:
    check_hostile(stream, cuts)


U16, U32, U64 = (st.integers(0, (1 << bits) - 1) for bits in (16, 32, 64))
FEW = st.integers(0, 8)
HEADERS = st.builds(
    HEADER.pack,
    st.just(b"AR"),
    st.just(VERSION),
    st.integers(0, 17),
    FEW | U16,
    FEW | U16,
    FEW | st.integers(298, 302) | U32,
    FEW | U32,
    st.integers(-2, 40) | st.integers(-(1 << 63), (1 << 63) - 1),
    st.integers(0, 2) | U64,
    st.integers(0, 40) | st.integers(498, 502) | U64,
)
TABLES = st.lists(st.integers(0, 40).map(lambda n: n.to_bytes(8, "little")), max_size=6)
PIECES = HEADERS | TABLES.map(b"".join) | st.binary(max_size=40)


@given(pieces=st.lists(PIECES, max_size=12), cuts=CUTS)
@settings(max_examples=200)
def test_frames_of_any_content_are_accepted_or_refused(
    pieces: list[bytes], cuts: list[int]
) -> None:
    check_hostile(b"".join(pieces), cuts)


@given(
    script=actions(SMALL_SIZES),
    flips=st.lists(st.tuples(st.integers(0, 1 << 30), st.integers(0, 7)), min_size=1),
    cuts=CUTS,
)
@settings(deadline=None, max_examples=100)
def test_damaged_stream_is_accepted_or_refused(
    script: list[object], flips: list[tuple[int, int]], cuts: list[int]
) -> None:
    with small_limits():
        stream = perform(script).stream
    for at, bit in flips:
        if stream:
            stream[at % len(stream)] ^= 1 << bit
    check_hostile(bytes(stream), cuts)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, (1 << 64) - 1)
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=6,
)


@given(head=st.binary() | VALUES.map(msgpack.packb))
def test_head_is_an_array_or_malformed(head: bytes) -> None:
    readers: Mapping[type, Callable[[bytes], object]] = {
        list: unpack_head,
        Hello: Hello.decode,
    }
    for kind, read in readers.items():
        with suppress(FrameTooLargeError, MalformedError):
            assert type(read(head)) is kind


@given(fields=st.lists(VALUES, min_size=3, max_size=11))
@settings(max_examples=50)
def test_hello_has_its_types_or_is_malformed(fields: list[object]) -> None:
    with suppress(FrameTooLargeError, MalformedError):
        hello = Hello.decode(msgpack.packb(fields))
        assert Hello.decode(hello.encode()) == hello


@given(
    role=st.sampled_from(Role), secret=st.none() | st.binary(max_size=4), data=st.data()
)
def test_forged_records_never_pass_the_handshake(
    role: Role, secret: bytes | None, data: st.DataObject
) -> None:
    end = Handshake(role, secret, bytes(32))
    prefaces = st.builds(lambda tail: b"ARPC\x02" + tail, st.binary(min_size=35))
    with suppress(AuthenticationError, MalformedError, VersionMismatchError):
        while wanted := end.wanted:
            record = data.draw(st.binary(min_size=wanted) | prefaces)
            end.receive(record[:wanted])
    assert end.state is HandshakeState.FAILED
    # To who begins as TLS does the preface alone says that this is none.
    assert len(end.farewell) in {0, 32, 40, 72}
