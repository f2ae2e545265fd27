"""Frames: how a byte stream is cut into messages and the bytes of their buffers.

    offset  0       2         3      4       6            8
            +-------+---------+------+-------+------------+-----------------+
            | "AR"  | version | kind | flags | head_bytes |  control_bytes  |
            +-------+---------+------+-------+------------+-----------------+
             2 bytes    u8       u8     u16       u16            u32
            12             16          24         32               40
            +--------------+-----------+----------+----------------+--- - -
            | buffer_count |    aux    | call_id  | payload_bytes  | body
            +--------------+-----------+----------+----------------+--- - -
                 u32           i64        u64           u64

    body:   head | control | table | payload

Integers are little-endian, like the tensors on every machine we support.  `head` is a
short msgpack array that routes the message (which function, which service); `control`
one encoded value; `table` one u64 per buffer: its length in the low 56 bits, its codec
and its placement in the high 8, which are 0 in this version.  The payload is the bytes
of the buffers and nothing else, so that it goes from its storage to the socket, and
from the socket to its storage, without a copy.

A payload of more than `INLINE_BYTES_MAX` does not follow its message: the message
carries the flag DEFERRED, and the bytes come in DATA frames, chunks of `CHUNK_BYTES`
each, over this connection or over lanes, between which other messages pass.  A DATA
frame has in `call_id` the serial of the transfer, and in `aux` the offset of its bytes
in the whole payload; see `chunks`.

`aux` of a REQUEST is the time left until its deadline in nanoseconds, -1 for no limit:
relative, so that clocks need not agree.

This module handles bytes only.  `messages` has the meaning of messages; `handshake` and
the runtime decide which messages are allowed when.

Messages whose buffers lie in memory that both ends share: the flag PLACED.

Their table has 16 bytes for each buffer: its length, with the placement in the high 8
bits, and its location.  A buffer with placement `IN_SLAB` begins at the offset in the
low 48 bits of its location, in the sender's slab whose id is in the high 16, and no
bytes of it are in the payload; the others come in the payload and have location 0.

Source: docs/reference/wire-protocol.md.  Where the two differ, this file is wrong.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

from asyncrpc.errors import MalformedError

MAGIC: Final = b"AR"
VERSION: Final = 3
HEADER: Final = struct.Struct("<2sBBHHIIqQQ")
HEADER_BYTES: Final = HEADER.size
_LENGTH: Final = struct.Struct("<Q")

# Up to here a payload travels with its message: one read on the other side, and one
# copy out of the read buffer, which costs less than a second system call.
INLINE_BYTES_MAX: Final = 64 << 10

# All but the last chunk of a payload have this length.  A small message may wait for
# one chunk: 0.1 ms at 5 GB/s.
CHUNK_BYTES: Final = 512 << 10

HEAD_BYTES_MAX: Final = 0xFFFF


class FrameKind(enum.IntEnum):
    """The kind of a frame; the number is on the wire and never reused."""

    HELLO = 1  # the identity of the sender; the first frame after the proofs
    REQUEST = 2  # run a function
    RESPONSE = 3  # the result of the function
    ERROR = 4  # the exception of the function
    CANCEL = 5  # the caller no longer wants the response
    STREAM_ITEM = 6  # one value of a generator
    STREAM_END = 7  # the generator returned; aux: the number of its items
    STREAM_CREDIT = 8  # aux: how many items the consumer has taken
    SERVICE = 9  # a message to a service of the worker; answered like a REQUEST
    NOTICE = 10  # a message to a service, never answered
    DATA = 11  # bytes of a deferred payload
    DROP = 12  # call_id: a transfer that is given up; aux: bytes sent
    PING = 13
    PONG = 14
    GOODBYE = 15  # no further request will be sent or accepted; answers still come
    LANES = 16  # aux: how many lanes are wanted; 0 from the dialer: it opens no lanes
    FREE = 18  # call_id: a place in a slab of the receiver that is no longer used
    ACK = 19  # aux: bytes that have been read; call_id: the lane, or 0 for lane 0
    CLOSE = 20  # the last frame of a side that ends in order; control: the reason
    CREDIT = 21  # aux: bytes that request call_id (0: any request) may send
    WANT = 22  # aux: bytes of the request call_id, which waits for credit
    LANE_BROKEN = 23  # call_id: a lane to dial again; aux: its last accepted attempt


# Of whom a frame may speak.  Whatever its number names is of its own connection.
FRAMES_ABOUT: Final[Mapping[FrameKind, str]] = {
    FrameKind.HELLO: "the sender",
    FrameKind.REQUEST: "a function or value of the receiver",
    FrameKind.RESPONSE: "a call of the receiver",
    FrameKind.ERROR: "a call of the receiver",
    FrameKind.CANCEL: "a call of the sender",
    FrameKind.STREAM_ITEM: "a call of the receiver",
    FrameKind.STREAM_END: "a call of the receiver",
    FrameKind.STREAM_CREDIT: "a call of the sender",
    FrameKind.SERVICE: "as the message says",
    FrameKind.NOTICE: "as the message says",
    FrameKind.DATA: "a transfer of the sender",
    FrameKind.DROP: "a transfer of the sender",
    FrameKind.PING: "the connection",
    FrameKind.PONG: "the connection",
    FrameKind.GOODBYE: "the sender",
    FrameKind.LANES: "the connection",
    FrameKind.FREE: "memory that the receiver lends to the sender",
    FrameKind.ACK: "bytes of the receiver",
    FrameKind.CLOSE: "the connection",
    FrameKind.CREDIT: "calls of the receiver",
    FrameKind.WANT: "a call of the sender",
    FrameKind.LANE_BROKEN: "a lane of the connection",
}
# Any other ends the connection of an observer.
FRAMES_OF_OBSERVERS: Final = frozenset({FrameKind.SERVICE, FrameKind.CANCEL})


class Flags(enum.IntFlag):
    """Bits of the header's flags."""

    NONE = 0
    DEFERRED = 1  # the payload comes in DATA frames
    STREAM = 2  # REQUEST: the function is a generator
    LANES = 4  # with DEFERRED: no DATA frame comes over the connection of the message
    PLACED = 8  # buffers lie in shared memory; the table has their locations
    NESTED = 16  # WANT: a function that runs for a call made the request


class Frame(NamedTuple):
    """A frame that has been read, without its buffers.

    A small message is passed on as these fields and its buffers, in this order, not as
    a record: making a record costs too much per message.
    """

    kind: int
    flags: int = 0
    call_id: int = 0
    aux: int = 0
    head: bytes = b""
    control: bytes = b""


def prefix(
    kind: int,
    call_id: int = 0,
    *,
    flags: int = 0,
    aux: int = 0,
    head: bytes = b"",
    control: bytes = b"",
    lengths: Sequence[int] = (),
    payload_bytes: int = 0,
) -> bytes:
    """Return a frame up to the beginning of its payload."""
    header = HEADER.pack(
        MAGIC,
        VERSION,
        kind,
        flags,
        len(head),
        len(control),
        len(lengths),
        aux,
        call_id,
        payload_bytes,
    )
    if lengths:
        if len(lengths) == 1:
            return header + head + control + _LENGTH.pack(lengths[0])
        table = struct.pack(f"<{len(lengths)}Q", *lengths)
        return b"".join((header, head, control, table))
    return header + head + control


def data_prefix(serial: int, offset: int, nbytes: int) -> bytes:
    """Return the header of a DATA frame; `nbytes` bytes of the payload follow."""
    return HEADER.pack(
        MAGIC, VERSION, FrameKind.DATA, 0, 0, 0, 0, offset, serial, nbytes
    )


INLINE: Final = 0
IN_SLAB: Final = 1
ENTRY_BYTES: Final = 16
LENGTH_BITS: Final = 56
_LENGTH_MASK: Final = (1 << LENGTH_BITS) - 1
_PLACED_FLAG: Final = int(Flags.PLACED)

# Returns the memory of so many bytes at a location, or raises `MalformedError`.
Places: TypeAlias = Callable[[int, int], memoryview]


class BufferRow(NamedTuple):
    """One line of the table.

    Attributes:
        length: the length of the buffer in bytes.
        location: the location in a slab; -1 if the bytes are in the payload.
    """

    length: int
    location: int


def placed_prefix(
    kind: int,
    call_id: int,
    *,
    flags: int,
    aux: int,
    head: bytes,
    control: bytes,
    entries: Sequence[BufferRow],
) -> bytes:
    """Return a PLACED frame up to the beginning of its payload.

    Args:
        entries: one row per buffer; buffers outside of slabs follow as the payload.
    """
    table: list[int] = []
    payload_bytes = 0
    for length, location in entries:
        if location < 0:
            table += (length, 0)
            payload_bytes += length
        else:
            table += (length | IN_SLAB << LENGTH_BITS, location)
    header = HEADER.pack(
        MAGIC,
        VERSION,
        kind,
        flags | _PLACED_FLAG,
        len(head),
        len(control),
        len(entries),
        aux,
        call_id,
        payload_bytes,
    )
    packed = struct.pack(f"<{len(table)}Q", *table)
    return b"".join((header, head, control, packed))


def check_body(count: int, payload_bytes: int) -> int:
    """Check the fields of a header; return how many bytes of table and payload follow.

    Args:
        count: number of buffers; 0 if the message's kind or flags forbid PLACED.
    """
    if not count:
        raise MalformedError("a message of this kind cannot lie in shared memory")
    if payload_bytes > INLINE_BYTES_MAX:
        raise MalformedError(f"{payload_bytes} bytes came beside placed buffers")
    return ENTRY_BYTES * count + payload_bytes


def read_table(scratch: bytearray | memoryview, at: int, count: int) -> list[BufferRow]:
    """Read the table of a PLACED frame."""
    numbers = struct.unpack_from(f"<{2 * count}Q", scratch, at)
    entries: list[BufferRow] = []
    for index in range(0, 2 * count, 2):
        length, location = numbers[index], numbers[index + 1]
        placement = length >> LENGTH_BITS
        if placement == IN_SLAB:
            entries.append(BufferRow(length & _LENGTH_MASK, location))
        elif placement == INLINE and not location:
            entries.append(BufferRow(length, -1))
        else:
            raise MalformedError(
                f"a buffer has placement {placement} at location {location:#x}"
            )
    return entries
