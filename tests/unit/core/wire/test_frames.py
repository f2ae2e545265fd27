"""Frames, heads, HELLOs and placed messages: their bytes, and what is refused."""

from __future__ import annotations

import struct
from dataclasses import astuple, replace
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrpc.core.wire.frames import (
    HEAD_BYTES_MAX,
    HEADER,
    HEADER_BYTES,
    INLINE_BYTES_MAX,
    PID_END,
    RANK_END,
    BufferRow,
    Flags,
    FrameKind,
    Hello,
    data_prefix,
    pack_head,
    placed_prefix,
    prefix,
    unpack_head,
)
from asyncrpc.core.wire.reader import FrameReader
from asyncrpc.errors import (
    FrameTooLargeError,
    LocalProtocolError,
    MalformedError,
    RemoteProtocolError,
)
from tests.unit.core.wire.recorder import Recorder, feed


def test_frame_is_laid_out_as_documented() -> None:
    """A change of these bytes is another version of the protocol."""
    frame = prefix(
        FrameKind.REQUEST,
        0x0102030405060708,
        flags=2,
        aux=-1,
        head=b"HE",
        control=b"CON",
        lengths=(5, 0),
        payload_bytes=5,
    )
    assert frame.hex(" ", -8).split() == [
        "4152030202000200",  # "AR", version 3, REQUEST, STREAM, 2 bytes of head
        "0300000002000000",  # 3 bytes of control, 2 buffers
        "ffffffffffffffff",  # no limit
        "0807060504030201",
        "0500000000000000",
        "4845434f4e050000",  # head, control, and the table
        "0000000000000000",
        "0000000000",
    ]


def test_frame_without_buffers_has_no_table() -> None:
    assert prefix(FrameKind.PING) == prefix(FrameKind.PING, 0, lengths=())
    assert len(prefix(FrameKind.PING)) == HEADER_BYTES == 40
    assert len(prefix(FrameKind.ERROR, 1, head=b"a", control=b"bc")) == 43


def test_data_frame_names_its_transfer() -> None:
    frame = data_prefix(serial=7, offset=512, nbytes=64)
    assert frame.hex(" ", -8).split() == [
        "4152030b00000000",  # DATA
        "0000000000000000",
        "0002000000000000",
        "0700000000000000",
        "4000000000000000",
    ]


def test_wire_numbers_do_not_change() -> None:
    assert [kind.name for kind in FrameKind] == [
        *("HELLO", "REQUEST", "RESPONSE", "ERROR", "CANCEL", "STREAM_ITEM"),
        *("STREAM_END", "STREAM_CREDIT", "SERVICE", "NOTICE", "DATA", "DROP", "PING"),
        *("PONG", "GOODBYE", "LANES", "FREE", "ACK", "CLOSE", "CREDIT"),
        *("WANT", "LANE_BROKEN"),
    ]
    assert [kind.value for kind in FrameKind] == [*range(1, 17), *range(18, 24)]


HELLO = Hello(
    name="trainer0",
    incarnation=(1 << 64) - 1,
    rank=-1,
    pid=4321,
    expects="ps",
    attempt=2,
    verdict="duplicate",
    addresses=("tcp://[::1]:29500", "uds:///run/a"),
    host_id="boot/net",
    strict=True,
    lane=(1 << 63) + 5,
)


class TestHello:
    def test_hello_arrives_as_it_was_sent(self) -> None:
        assert Hello.decode(HELLO.encode()) == HELLO
        plain = Hello("a", 1, 0, 2)
        assert Hello.decode(plain.encode()) == plain

    def test_hello_fields_of_a_later_version_are_ignored(self) -> None:
        fields = [*astuple(HELLO), {"new": "field"}, 7]
        assert Hello.decode(msgpack.packb(fields)) == HELLO

    @pytest.mark.parametrize("kept", range(4, 11))
    def test_hello_fields_of_a_later_version_have_defaults(self, kept: int) -> None:
        fields = list(astuple(HELLO))[:kept]
        assert Hello.decode(msgpack.packb(fields)) == Hello(
            *fields[:4], **dict(zip(Hello.__slots__[4:], fields[4:], strict=False))
        )

    @pytest.mark.parametrize("field", range(11))
    @pytest.mark.parametrize("wrong", [None, 1.5, {}, [7], [None]])
    def test_hello_field_of_another_type_is_malformed(
        self, field: int, wrong: object
    ) -> None:
        fields: list[object] = [*astuple(HELLO)]
        fields[field] = wrong
        with pytest.raises(MalformedError, match="HELLO"):
            Hello.decode(msgpack.packb(fields))

    @pytest.mark.parametrize(
        ("field", "values"),
        [
            ("name", ["", "x" * 256, "a\nb", "\x1b[2J", "\u202eps", "\x00"]),
            ("rank", [-2, RANK_END, 1 << 63]),
            ("pid", [-1, PID_END]),
            ("incarnation", [0, -1]),
            ("host_id", ["x" * 256]),
            ("addresses", [("tcp://h:1",) * 1_000, ("x" * 8_193,)]),
            ("sidecar", [("x" * 8_193,)]),
        ],
    )
    def test_hello_field_with_an_impossible_value_is_malformed(
        self, field: str, values: list[Any]
    ) -> None:
        for value in values:
            hello = replace(HELLO, **{field: value})
            with pytest.raises(MalformedError, match="a HELLO has"):
                Hello.decode(hello.encode())

    def test_hello_bool_is_not_a_number(self) -> None:
        with pytest.raises(MalformedError, match="wrong fields"):
            Hello.decode(pack_head(["a", True, 0, 1]))

    @pytest.mark.parametrize("kept", range(4))
    def test_hello_without_a_field_is_malformed(self, kept: int) -> None:
        with pytest.raises(MalformedError, match="wrong fields"):
            Hello.decode(pack_head([*astuple(HELLO)][:kept]))

    def test_overlong_hello_is_refused_unread(self) -> None:
        with pytest.raises(FrameTooLargeError, match="65536 bytes"):
            Hello.decode(b"\xc1" * (HEAD_BYTES_MAX + 1))

    def test_overlong_hello_is_not_sent(self) -> None:
        with pytest.raises(LocalProtocolError, match="the limit is 65535"):
            Hello("a" * HEAD_BYTES_MAX, 1, 0, 1).encode()


class TestHead:
    def test_head_arrives_as_it_was_packed(self) -> None:
        record = [[1, "module.function"], {"r": [1, -2], "text": b"bytes"}, None, 0.5]
        assert unpack_head(pack_head(record)) == record

    def test_unpackable_head_leaves_nothing_behind(self) -> None:
        with pytest.raises(TypeError):
            pack_head(["begun", object()])
        assert pack_head([1]) == b"\x91\x01"

    @pytest.mark.parametrize(
        "head",
        [
            b"",
            b"\x92\x01",  # ends early
            b"\x91\x01\x01",  # goes on
            b"\xc1",  # never used
            b"\x91\xa1\xff",  # no UTF-8
            b"\xdd\xff\xff\xff\xff",  # four billion values
            b"\x91" * 2000,  # too deep
            b"\x91\x81\x90\x01",  # an array as a key
            b"\x91\xd5\xff\x00\x00",  # a moment that is none
        ],
    )
    def test_head_that_is_not_msgpack_is_malformed(self, head: bytes) -> None:
        with pytest.raises(MalformedError, match="not msgpack"):
            unpack_head(head)

    @pytest.mark.parametrize("value", [1, None, "text", {}])
    def test_head_that_is_not_an_array_is_malformed(self, value: object) -> None:
        with pytest.raises(MalformedError, match="not an array"):
            unpack_head(msgpack.packb(value))


SLAB = bytearray(b"0123456789" * 100)
REQUEST, PLACED = int(FrameKind.REQUEST), Flags.PLACED


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


BROKEN: dict[str, bytes] = {
    "another placement": tampered(0, 2 << 56 | 4),
    "inline with a location": tampered(0, 4),
    "behind the end": tampered(1, at(len(SLAB))),
    "another slab": tampered(1, 4 << 48),
    "does not add up": misstated(),
    "a PING": frame(BufferRow(4, at(0)), kind=FrameKind.PING),
    "a GOODBYE": frame(BufferRow(4, at(0)), kind=FrameKind.GOODBYE),
    "a payload without a buffer": (
        prefix(REQUEST, 1, flags=Flags.PLACED, payload_bytes=5) + bytes(5)
    ),
    "deferred, too": prefix(REQUEST, 1, flags=PLACED | Flags.DEFERRED, lengths=(5,)),
    "too much inline": frame(BufferRow(INLINE_BYTES_MAX + 1, -1)),
}


@pytest.mark.parametrize("stream", BROKEN.values(), ids=BROKEN)
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


@given(st.integers(0, len(MIXED) - 1), st.integers(0, 255), st.integers(1, 99))
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
