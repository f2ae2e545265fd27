"""What a reader accepts, where it has it land, and how it refuses the rest."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrpc.core.wire import chunks as chunks_module
from asyncrpc.core.wire.frames import (
    HEADER,
    HEADER_BYTES,
    INLINE_BYTES_MAX,
    VERSION,
    Flags,
    FrameKind,
    data_prefix,
    prefix,
)
from asyncrpc.core.wire.limits import MessageLimits
from asyncrpc.core.wire.reader import (
    ALIGNMENT,
    RESTING_BYTES,
    SCRATCH_BYTES,
    FrameReader,
)
from asyncrpc.errors import (
    FrameTooLargeError,
    MalformedError,
    RemoteProtocolError,
    VersionMismatchError,
)
from tests.unit.core.wire.recorder import WITH_VALUE, Message, Recorder, feed

REQUEST, RESPONSE = FrameKind.REQUEST, FrameKind.RESPONSE
PING = prefix(FrameKind.PING, 9)
CHUNK = 4
PINGED = Message(FrameKind.PING, 0, 9, 0, b"", b"")


def opening(call_id: int, *lengths: int, kind: int = REQUEST) -> bytes:
    """Return a message whose payload is to come in DATA frames."""
    total = sum(lengths)
    flags = Flags.DEFERRED
    return prefix(kind, call_id, flags=flags, lengths=lengths, payload_bytes=total)


def piece(serial: int, offset: int, payload: bytes) -> bytes:
    return data_prefix(serial, offset, len(payload)) + payload


def pieces(serial: int, payload: bytes) -> bytes:
    """Return a whole payload, in chunks."""
    cuts = range(0, len(payload), CHUNK)
    return b"".join(piece(serial, at, payload[at : at + CHUNK]) for at in cuts)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks_module, "CHUNK_BYTES", CHUNK)


class TestMessages:
    def test_every_field_of_a_message_arrives(self) -> None:
        sink = Recorder()
        stream = prefix(
            REQUEST,
            (1 << 64) - 1,
            flags=Flags.STREAM,
            aux=-(1 << 63),
            head=b"head",
            control=b"control",
            lengths=(3, 0, 2),
            payload_bytes=5,
        )
        feed(sink.reader(), stream + b"abcde" + PING)
        assert sink.messages == [
            Message(
                REQUEST,
                Flags.STREAM,
                (1 << 64) - 1,
                -(1 << 63),
                b"head",
                b"control",
                (b"abc", b"", b"de"),
            ),
            PINGED,
        ]

    def test_many_small_messages_cost_one_read(self) -> None:
        sink = Recorder()
        reader = sink.reader()
        stream = PING * 1000
        reader.get_buffer()[: len(stream)] = stream
        reader.advance(len(stream))
        assert sink.messages == [PINGED] * 1000

    @pytest.mark.parametrize("step", [1, 39, 40, 41])
    def test_messages_may_come_in_any_pieces(self, step: int) -> None:
        sink = Recorder()
        stream = prefix(REQUEST, 1, head=b"h", control=b"c" * 50) + PING
        feed(sink.reader(), stream * 3, at_most=(step,))
        assert [message.kind for message in sink.messages] == [REQUEST, PING[3]] * 3

    def test_sink_may_change_between_two_messages(self) -> None:
        """As it does when the HELLO is in."""
        second = Recorder()

        class First(Recorder):
            def on_message(self, *_message: object) -> None:
                reader.sink = second

        reader = First().reader()
        feed(reader, PING * 2)
        assert second.messages == [PINGED]

    def test_inline_buffers_are_aligned_and_counted_as_copied(self) -> None:
        sink = Recorder()
        reader = sink.reader()
        stream = prefix(REQUEST, 1, lengths=(1, 64, 65), payload_bytes=130) + bytes(130)
        feed(reader, stream)
        assert sink.allocated == [4 * ALIGNMENT]
        assert reader.bytes_copied == 130


class TestMoving:
    """A payload that is arriving is to land elsewhere."""

    @pytest.mark.parametrize("cut", range(1, 2 * HEADER_BYTES + 8))
    def test_moved_payload_leaves_its_old_memory_alone(self, cut: int) -> None:
        """Wherever the stream is cut: also within a chunk, or its header."""
        sink = Recorder()
        reader = sink.reader()
        first = opening(1, 3, 4, kind=RESPONSE)
        stream = pieces(1, b"abcdefg")
        feed(reader, first)
        feed(reader, stream[:cut], (3,))
        old = sink.buffers[:]
        landed = [bytes(memory) for memory in old]
        moved: list[memoryview] = []

        def make(nbytes: int) -> memoryview:
            moved.append(memoryview(bytearray(nbytes)))
            return moved[-1]

        reader.arrivals.move(RESPONSE, 1, make)
        feed(reader, stream[cut:], (3,))
        feed(reader, PING)
        assert [bytes(memory) for memory in old] == landed
        if cut == len(stream):
            assert moved == []
            return
        had = b"".join(landed).replace(b"\xaa", b"")
        arrived = bytes(len(had)) + b"abcdefg"[len(had) :]
        assert b"".join(sink.messages[0].buffers) == arrived
        assert b"".join(map(bytes, moved)) == arrived
        assert sink.messages[1] == PINGED

    def test_move_of_another_message_changes_nothing(self) -> None:
        sink = Recorder()
        reader = sink.reader()
        feed(reader, opening(1, 3))
        for kind, call_id in ((RESPONSE, 1), (REQUEST, 2)):
            reader.arrivals.move(kind, call_id, lambda _: memoryview(b""))
        feed(reader, piece(1, 0, b"abc"))
        assert sink.messages[0].buffers == (b"abc",)


class TestCounting:
    """What was copied of each message, told while it is handed on."""

    def test_copied_bytes_count_inline_payloads_only(self) -> None:
        copied: list[tuple[int, int]] = []

        class Sink(Recorder):
            def on_message(self, *message: Any) -> None:
                copied.append((message[2], reader.message_bytes_copied))

        reader = Sink().reader()
        inline = prefix(REQUEST, 1, lengths=(2, 3), payload_bytes=5) + b"abcde"
        feed(reader, inline + prefix(REQUEST, 2) + inline)
        feed(reader, opening(3, 5) + piece(1, 0, b"abcd"))  # in one read: strays
        feed(reader, piece(1, 4, b"e"))
        feed(reader, opening(4, 5))
        feed(reader, inline)
        feed(reader, pieces(2, b"abcde") + PING)
        assert copied == [(1, 5), (2, 0), (1, 5), (3, 4), (1, 5), (4, 0), (9, 0)]
        assert reader.bytes_copied == 5 + 5 + 4 + 5


class TestLongFrames:
    @pytest.mark.parametrize("step", [1 << 12, 1 << 30])
    def test_long_frame_gets_a_temporary_buffer(self, step: int) -> None:
        sink = Recorder()
        reader = sink.reader()
        control = bytes(range(256)) * (SCRATCH_BYTES // 128)
        feed(reader, PING + prefix(REQUEST, 1, control=control) + PING, (step,))
        assert [message.control for message in sink.messages] == [b"", control, b""]
        assert reader.get_buffer().nbytes == SCRATCH_BYTES

    @pytest.mark.parametrize("step", [1 << 16, 1 << 30])
    def test_very_long_control_parts_arrive_intact(self, step: int) -> None:
        sink = Recorder()
        lengths = [1, *[0] * 65_000]  # the scratch buffer keeps their size for a while
        table = prefix(
            REQUEST, 1, control=bytes(900_000), lengths=lengths, payload_bytes=1
        )
        stream = table + b"x" + PING
        for letter in b"abc":
            control = bytes([letter]) * ((1 << 20) + letter)
            stream += prefix(REQUEST, letter, control=control) + PING
        feed(sink.reader(), stream, (step,))
        assert [message.call_id for message in sink.messages[2::2]] == [*b"abc"]
        for message in sink.messages[2::2]:
            control = bytes([message.call_id]) * ((1 << 20) + message.call_id)
            assert bytes(message.control) == control
        assert sink.messages[1::2] == [PINGED] * 4

    def test_message_at_the_end_of_the_scratch_buffer_is_moved(self) -> None:
        sink = Recorder()
        reader = sink.reader()
        message = prefix(REQUEST, 1, control=b"c" * 1000)
        count = 2 * SCRATCH_BYTES // len(message)
        feed(reader, message * count)
        assert len(sink.messages) == count
        assert {message.control for message in sink.messages} == {b"c" * 1000}


class TestTransfers:
    def test_payload_lands_in_its_buffers(self) -> None:
        sink = Recorder()
        reader = sink.reader()
        feed(reader, opening(1, 3, 0, 4))
        assert sink.allocated == [3, 0, 4]
        assert len(reader.arrivals) == 1
        feed(reader, piece(1, 0, b"abcd"))
        feed(reader, PING)
        feed(reader, piece(1, 4, b"efg"))
        assert sink.messages == [
            PINGED,
            Message(REQUEST, 0, 1, 0, b"", b"", (b"abc", b"", b"defg")),
        ]
        assert reader.bytes_copied == 0
        assert not len(reader.arrivals)

    def test_payload_bytes_read_with_the_header_are_moved(self) -> None:
        """A peer may send faster than the reader asks for exactly what it wants."""
        sink = Recorder()
        reader = sink.reader()
        stream = opening(1, 3, 4) + pieces(1, b"abcdefg") + PING
        reader.get_buffer()[: len(stream)] = stream
        reader.advance(len(stream))
        assert sink.messages[0].buffers == (b"abc", b"defg")
        assert sink.messages[1] == PINGED
        assert reader.bytes_copied == 7

    @pytest.mark.parametrize("cut", [1, 2, 3])
    def test_payload_is_joined_from_strays_and_the_rest(self, cut: int) -> None:
        sink = Recorder()
        reader = sink.reader()
        stream = opening(1, 3, 4) + pieces(1, b"abcdefg")
        nbytes = len(stream) - cut
        reader.get_buffer()[:nbytes] = stream[:nbytes]
        reader.advance(nbytes)
        assert sink.messages == []
        feed(reader, stream[nbytes:], (1,))
        assert sink.messages[0].buffers == (b"abc", b"defg")
        assert reader.bytes_copied == 7 - cut

    def test_payloads_of_two_calls_may_alternate(self) -> None:
        sink = Recorder()
        stream = opening(1, 6) + opening(2, 6) + opening(1, 6, kind=RESPONSE)
        stream += piece(1, 0, b"abcd") + piece(2, 0, b"ABCD") + piece(1, 4, b"ef")
        stream += pieces(3, b"123456") + piece(2, 4, b"EF")
        feed(sink.reader(), stream)
        arrived = [
            (message.kind, message.call_id, message.buffers)
            for message in sink.messages
        ]
        assert arrived == [
            (REQUEST, 1, (b"abcdef",)),
            (RESPONSE, 1, (b"123456",)),
            (REQUEST, 2, (b"ABCDEF",)),
        ]

    @pytest.mark.parametrize("kind", WITH_VALUE)
    def test_payload_dropped_by_peer_is_never_delivered(self, kind: FrameKind) -> None:
        sink = Recorder()
        reader = sink.reader()
        drop = prefix(FrameKind.DROP, 1, aux=4)
        begun = opening(1, 6, kind=kind) + piece(1, 0, b"abcd")
        feed(reader, begun + drop + PING)
        assert (sink.dropped, sink.messages) == ([(kind, 1)], [PINGED])
        assert not len(reader.arrivals)
        feed(reader, opening(1, 1) + piece(2, 0, b"x"))
        assert sink.messages[-1].buffers == (b"x",)

    def test_payload_dropped_here_arrives_undelivered(self) -> None:
        sink = Recorder()
        reader = sink.reader()
        feed(reader, opening(1, 6) + piece(1, 0, b"abcd"))
        assert reader.arrivals.forget(REQUEST, 1) is not None
        assert reader.arrivals.forget(RESPONSE, 1) is None
        feed(reader, piece(1, 4, b"ef") + PING)
        assert sink.messages == [PINGED]
        assert reader.arrivals.forget(REQUEST, 1) is None

    @pytest.mark.parametrize("kind", WITH_VALUE)
    def test_message_with_a_value_may_be_deferred(self, kind: FrameKind) -> None:
        sink = Recorder()
        stream = opening(1, 2, kind=kind) + piece(1, 0, b"ab")
        feed(sink.reader(), stream)
        assert sink.messages[0].buffers == (b"ab",)


def header(
    *,
    magic: bytes = b"AR",
    version: int = VERSION,
    kind: int = REQUEST,
    flags: int = 0,
    head: int = 0,
    control: int = 0,
    count: int = 0,
    aux: int = 0,
    call_id: int = 1,
    payload: int = 0,
) -> bytes:
    sizes = (head, control, count, aux, call_id, payload)
    return HEADER.pack(magic, version, kind, flags, *sizes)


LIMITS = MessageLimits(
    control_bytes_max=100, payload_bytes_max=1000, buffers_max=4, transfers_max=2
)


class TestRefusals:
    @pytest.mark.parametrize(
        ("stream", "error", "text"),
        [
            (header(magic=b"HT"), MalformedError, "begins with b'HT'"),
            (header(version=1), VersionMismatchError, "version 1 of .*, we 3"),
            (header(kind=0), MalformedError, "0 is not a kind"),
            (header(kind=99), MalformedError, "99 is not a kind"),
            (header(control=101), FrameTooLargeError, "control part of 101 bytes"),
            (header(payload=1001, count=1), FrameTooLargeError, "payload of 1001"),
            (header(count=5), FrameTooLargeError, "5 buffers arrived; the limit is 4"),
            (header(payload=1), MalformedError, "1 bytes has no buffer"),
            (
                header(payload=9, count=1, flags=Flags.DEFERRED, kind=FrameKind.PING),
                MalformedError,
                "a PING cannot defer",
            ),
            (
                header(count=1, flags=Flags.DEFERRED),
                MalformedError,
                "a REQUEST cannot defer 0 bytes",
            ),
            (header(flags=Flags.DEFERRED), MalformedError, "a REQUEST cannot defer"),
            (
                header(kind=FrameKind.DROP),
                MalformedError,
                "transfer 1 is given up, but is not under way",
            ),
            (
                prefix(REQUEST, 1, lengths=(3, 2), payload_bytes=6) + bytes(6),
                MalformedError,
                "does not add up",
            ),
            (  # a codec that this version does not know
                prefix(REQUEST, 1, lengths=(1 << 56 | 3,), payload_bytes=3) + bytes(3),
                MalformedError,
                "does not add up",
            ),
            (
                opening(1, 9) + opening(2, 9) + opening(3, 9),
                FrameTooLargeError,
                "more than 2 transfers",
            ),
        ],
    )
    def test_frame_that_breaks_the_protocol_is_refused(
        self, stream: bytes, error: type[RemoteProtocolError], text: str
    ) -> None:
        sink = Recorder()
        with pytest.raises(error, match=text) as caught:
            feed(sink.reader(LIMITS), stream)
        assert type(caught.value) is error
        assert sink.messages == []

    @pytest.mark.parametrize(
        ("stream", "text"),
        [
            (piece(2, 0, b"a"), "1 bytes came for transfer 2, which expects none"),
            (data_prefix(1, 0, 0), "0 bytes at 0 are not a chunk of 6"),
            (piece(1, 1, b"abcd"), "4 bytes at 1 are not a chunk"),
            (piece(1, -4, b"abcd"), "4 bytes at -4"),
            (piece(1, 0, b"abcde"), "5 bytes at 0"),
            (piece(1, 0, b"abcd") * 2, "the chunk at 0 of a payload comes twice"),
            (piece(1, 4, b"abcd"), "4 bytes at 4"),
            (
                HEADER.pack(b"AR", VERSION, FrameKind.DATA, 0, 1, 0, 0, 0, 1, 4),
                "more than a chunk of a payload",
            ),
        ],
    )
    def test_bytes_of_an_unknown_transfer_are_refused(
        self, stream: bytes, text: str
    ) -> None:
        """A gap, above all, would hand out what our memory held before."""
        sink = Recorder()
        with pytest.raises(MalformedError, match=text):
            feed(sink.reader(), opening(1, 6) + stream)
        assert sink.messages == []

    def test_inline_payload_over_its_limit_is_refused(self) -> None:
        most = prefix(
            REQUEST,
            1,
            lengths=(INLINE_BYTES_MAX,),
            payload_bytes=INLINE_BYTES_MAX,
        ) + bytes(INLINE_BYTES_MAX)
        sink = Recorder()
        feed(sink.reader(), most)
        assert sink.messages[0].buffers == (bytes(INLINE_BYTES_MAX),)
        with pytest.raises(FrameTooLargeError, match="65537 bytes came inline"):
            feed(sink.reader(), header(count=1, payload=INLINE_BYTES_MAX + 1))

    @pytest.mark.parametrize("deferred", [True, False])
    def test_payload_without_memory_is_refused(self, *, deferred: bool) -> None:
        sink = Recorder(allocated_max=10)
        inline = prefix(REQUEST, 1, lengths=(11,), payload_bytes=11) + bytes(11)
        with pytest.raises(FrameTooLargeError, match="no memory for"):
            feed(sink.reader(), opening(1, 11) if deferred else inline)

    def test_refused_frame_allocates_nothing(self) -> None:
        sink = Recorder()
        huge = header(flags=Flags.DEFERRED, count=1, payload=1001)
        for stream in (huge, header(control=101), header(count=5)):
            reader = sink.reader(LIMITS)
            with pytest.raises(FrameTooLargeError):
                feed(reader, stream)
            assert reader.get_buffer().nbytes <= SCRATCH_BYTES
        assert sink.allocated == []


def test_reader_asks_for_one_byte_to_a_header() -> None:
    """While a payload is on its way: its bytes must not land in the scratch buffer."""
    reader = Recorder().reader()
    feed(reader, opening(1, 9))
    assert reader.get_buffer().nbytes == HEADER_BYTES
    feed(reader, PING[:39])
    assert reader.get_buffer().nbytes == 1
    feed(reader, PING[39:] + data_prefix(1, 0, 4))
    assert reader.get_buffer().nbytes == 4


@pytest.mark.parametrize("kind", [*FrameKind])
def test_messages_without_values_have_short_control_parts(kind: FrameKind) -> None:
    frame = prefix(kind, 1, control=bytes((64 << 10) + 1))
    sink = Recorder()
    if kind in WITH_VALUE:
        feed(sink.reader(), frame)
        assert len(sink.messages) == 1
    else:
        with pytest.raises((FrameTooLargeError, MalformedError)):
            feed(sink.reader(), frame)


class TestRest:
    """What a reader keeps while nothing comes."""

    MESSAGE = prefix(REQUEST, 1, control=b"\xaa" * (SCRATCH_BYTES // 2))

    def test_rest_releases_bytes_already_read(self) -> None:
        sink = Recorder()
        reader = sink.reader()
        feed(reader, self.MESSAGE)
        assert any(_beyond(reader))
        reader.rest()
        assert not any(_beyond(reader))  # pages that have not been written are zero
        feed(reader, self.MESSAGE)
        assert len(sink.messages) == 2

    def test_rest_of_an_idle_reader_releases_the_whole_buffer(self) -> None:
        reader = Recorder().reader()
        feed(reader, self.MESSAGE)
        reader.rest(0)
        assert not any(_kept(reader))

    def test_rest_releases_the_memory_of_a_long_message(self) -> None:
        reader = Recorder().reader()
        feed(reader, prefix(REQUEST, 1, control=bytes(4 * SCRATCH_BYTES)))
        assert len(_kept(reader)) > SCRATCH_BYTES
        reader.rest()
        assert len(_kept(reader)) == SCRATCH_BYTES

    @pytest.mark.parametrize("nbytes", [1, HEADER_BYTES, HEADER_BYTES + 9])
    def test_rest_keeps_the_beginning_of_a_message(self, nbytes: int) -> None:
        sink = Recorder()
        reader = sink.reader()
        feed(reader, self.MESSAGE[:nbytes])
        reader.rest()
        feed(reader, self.MESSAGE[nbytes:])
        assert len(sink.messages) == 1

    def test_rest_keeps_a_payload_on_its_way(self) -> None:
        sink = Recorder()
        reader = sink.reader()
        stream = opening(1, 2 * CHUNK) + pieces(1, b"12345678")
        for at in range(len(stream)):
            feed(reader, stream[at : at + 1])
            reader.rest()
        assert [message.buffers for message in sink.messages] == [(b"12345678",)]


def _beyond(reader: FrameReader) -> memoryview:
    """What of a reader's buffer is not kept while nothing comes."""
    return _kept(reader)[RESTING_BYTES:]


def _kept(reader: FrameReader) -> memoryview:
    return reader._view  # noqa: SLF001
