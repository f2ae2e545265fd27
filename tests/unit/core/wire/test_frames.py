"""The bytes of a frame are those of the table in `frames`."""

from __future__ import annotations

from asyncrpc.core.wire.frames import (
    HEADER_BYTES,
    FrameKind,
    data_prefix,
    prefix,
)


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
        "HELLO",
        "REQUEST",
        "RESPONSE",
        "ERROR",
        "CANCEL",
        "STREAM_ITEM",
        "STREAM_END",
        "STREAM_CREDIT",
        "SERVICE",
        "NOTICE",
        "DATA",
        "DROP",
        "PING",
        "PONG",
        "GOODBYE",
        "LANES",
        "FREE",
        "ACK",
        "CLOSE",
        "CREDIT",
        "WANT",
        "LANE_BROKEN",
    ]
    assert [kind.value for kind in FrameKind] == [*range(1, 17), *range(18, 24)]
