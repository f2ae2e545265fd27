"""Frames: how a byte stream is cut into messages, and what their heads say.

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

`handshake` and the parts of a link decide which messages are allowed when.

The buffers of a message with the flag PLACED lie in memory that both ends share.  Its
table has 16 bytes for each buffer: its length, with the placement in the high 8
bits, and its location.  A buffer with placement `IN_SLAB` begins at the offset in the
low 48 bits of its location, in the sender's slab whose id is in the high 16, and no
bytes of it are in the payload; the others come in the payload and have location 0.

Control messages are records: arrays, their fields in order.  Evolution: fields are
added at the end and have a default; a reader ignores fields that it does not know.  No
field is removed or given another meaning without a new protocol version.

`head` of each kind of frame:

    REQUEST     [target, meta]   the function, and data that accompanies the values
    RESPONSE    [meta] or empty
    ERROR       [meta] or empty
    STREAM_ITEM [serial]
    SERVICE     [service, method]
    NOTICE      [service, method]

`target` is an int for a function whose name this connection has sent before, `[id,
name]` to send a name, `["=", ...]` for a target that an extension resolves (such as a
method of a remote reference), and nil when the callable is the first value of the
control part.

Source: docs/reference/wire-protocol.md.  Where the two differ, this file is wrong.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any, Final, NamedTuple, TypeAlias

import msgpack

from asyncrpc.core.ids import NAME_CHARACTERS_MAX, is_name
from asyncrpc.errors import (
    FrameTooLargeError,
    LocalProtocolError,
    MalformedError,
)

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


RANK_END: Final = 1 << 31
PID_END: Final = 1 << 32
HOST_ID_CHARACTERS_MAX: Final = 255
ADDRESSES_CHARACTERS_MAX: Final = 8_192  # of all addresses of a worker

Target: TypeAlias = "int | list[Any] | None"
Meta: TypeAlias = Mapping[str, Any]

# msgpack's packer is reused: making one costs more than packing a head.
_PACKER: Final = msgpack.Packer(autoreset=True)


@dataclass(frozen=True, slots=True)
class Hello:
    """The identity of one end of a connection; the first frame of each side.

    Attributes:
        name: the name of the worker.
        incarnation: the incarnation of the worker.
        rank: the rank of the worker; -1 if it has no rank.
        pid: the id of its process, for error texts.
        expects: the name of the worker that the dialer wants; empty in an answer.
        attempt: how many connections the dialer has tried before this one.
        verdict: empty if the acceptor accepts the connection, else the reason.
        addresses: addresses at which the worker can be reached.
        host_id: identifies the host and the network namespace of the worker.
        strict: whether the worker refuses pickles.
        lane: from the dialer: 0, or the token of the connection that this is a lane of.
        resume: from the dialer: 0, or the token of the connection that this connection
            resumes; see `wire.resume`.
        received: with `resume`, and in the answer to it: how many bytes of the resumed
            connection this side has read.
        sidecar: where peers can ask whether the worker's process runs; may be empty.
        token: from a relay that dials for another: the token of the connection that is
            passed on; else 0.
        observes: from the dialer: whether it only looks, as a command of `asyncrpc`
            does, and is not a member.
    """

    name: str
    incarnation: int
    rank: int
    pid: int
    expects: str = ""
    attempt: int = 0
    verdict: str = ""
    addresses: tuple[str, ...] = ()
    host_id: str = ""
    strict: bool = False
    lane: int = 0
    resume: int = 0
    received: int = 0
    sidecar: tuple[str, ...] = ()
    token: int = 0
    observes: bool = False

    def is_of(self, other: Hello) -> bool:
        """Return whether the same life of the same worker introduces itself.

        Its number alone does not tell: every worker knows it.
        """
        return (self.name, self.incarnation) == (other.name, other.incarnation)

    def encode(self) -> bytes:
        """Return the control part of a HELLO frame."""
        return pack_head(list(astuple(self)))

    @classmethod
    def decode(cls, control: bytes) -> Hello:
        """Read what `encode` wrote."""
        if len(control) > HEAD_BYTES_MAX:
            raise FrameTooLargeError(
                f"a HELLO has {len(control)} bytes; the limit is {HEAD_BYTES_MAX}"
            )
        record = unpack_head(control)
        if len(record) < _HELLO_REQUIRED or any(
            type(value) is not kind
            for value, kind in zip(record, _HELLO_TYPES, strict=False)
        ):
            raise MalformedError("a HELLO has the wrong fields")
        names = [field.name for field in fields(cls)]
        values = dict(zip(names, record, strict=False))
        for name in ("addresses", "sidecar"):
            addresses = values.get(name, [])
            if any(type(address) is not str for address in addresses):
                raise MalformedError("a HELLO has an address that is not a string")
            values[name] = tuple(addresses)
        hello = cls(**values)
        if problem := hello._problem():
            raise MalformedError(f"a HELLO has {problem}")
        return hello

    def _problem(self) -> str:
        """Return which field no worker can have so; empty if there is none."""
        if not is_name(self.name):
            return f"no name of 1 to {NAME_CHARACTERS_MAX} printable characters"
        if not -1 <= self.rank < RANK_END:
            return f"the rank {self.rank}"
        if not 0 <= self.pid < PID_END:
            return f"the process id {self.pid}"
        if not self.incarnation > 0 or len(self.host_id) > HOST_ID_CHARACTERS_MAX:
            return "no identity of a worker"
        for addresses in (self.addresses, self.sidecar):
            if sum(map(len, addresses)) > ADDRESSES_CHARACTERS_MAX:
                return f"addresses of more than {ADDRESSES_CHARACTERS_MAX} characters"
        return ""


_HELLO_TYPES: Final = (
    *(str, int, int, int, str, int, str, list, str, bool, int),
    *(int, int, list, int, bool),
)
_HELLO_REQUIRED: Final = 4  # the fields without a default


def pack_head(record: list[Any]) -> bytes:
    """Return the bytes of a head."""
    packed: bytes = _PACKER.pack(record)
    if len(packed) > HEAD_BYTES_MAX:
        raise LocalProtocolError(
            f"a head has {len(packed)} bytes; the limit is {HEAD_BYTES_MAX}"
        )
    return packed


def unpack_head(head: bytes) -> list[Any]:
    """Read what `pack_head` wrote; always an array."""
    try:
        record = msgpack.unpackb(head, strict_map_key=True)
    except (ValueError, msgpack.UnpackException) as error:
        raise MalformedError(f"a head is not msgpack: {error}") from error
    if type(record) is not list:
        raise MalformedError("a head is not an array")
    return record
