"""The buffers of one message on their way out, and views of memory without a copy."""

from __future__ import annotations

import ctypes
from typing import Final

from asyncrpc.serde.copies import Copy

# One block type per power of two, sliced to size: ctypes keeps every array type that it
# has made, so one type per length would leak.  0.6 us a view, for any dtype; by way of
# numpy 1.1 us, and 1.6 us for dtypes that numpy does not know.
_BLOCKS: Final = tuple(ctypes.c_ubyte * (1 << power) for power in range(48))


def view_memory(owner: object, address: int, size_bytes: int) -> memoryview:
    """Return a view of memory that `owner` holds; the view keeps `owner` alive."""
    block = _BLOCKS[(size_bytes - 1).bit_length()].from_address(address)
    block.owner = owner  # type: ignore[attr-defined]
    return memoryview(block).cast("B")[:size_bytes]


class OutgoingBuffers:
    """Buffers in the order they will be sent.

    Attributes:
        buffers: C-contiguous views in format `B`; each keeps its memory alive.
        bytes_copied: bytes that were gathered in user space to make them contiguous.
        copies: copies from devices into some of the buffers that must still be made.
    """

    __slots__ = ("buffers", "bytes_copied", "copies")

    def __init__(self) -> None:
        self.buffers: list[memoryview] = []
        self.bytes_copied = 0
        self.copies: list[Copy] = []

    def add(self, view: memoryview) -> int:
        """Append a buffer and return its index."""
        self.buffers.append(view)
        return len(self.buffers) - 1
