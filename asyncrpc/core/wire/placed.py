"""Messages whose buffers lie in memory that both ends share: the flag PLACED.

Their table has 16 bytes for each buffer: its length, with the placement in the high 8
bits, and its location.  A buffer with placement `IN_SLAB` begins at the offset in the
low 48 bits of its location, in the sender's slab whose id is in the high 16, and no
bytes of it are in the payload; the others come in the payload and have location 0.

Source: docs/reference/wire-protocol.md.  Where the two differ, this file is wrong.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeAlias

from asyncrpc.core.wire.frames import HEADER, INLINE_BYTES_MAX, MAGIC, VERSION, Flags
from asyncrpc.errors import MalformedError

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
