"""An encoded value: the parts of it that a message has."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from asyncrpc.core.serde.copies import Copy

# One block type per power of two, sliced to size: ctypes keeps every array type that it
# has made, so one type per length would leak.  0.6 us a view, for any dtype; by way of
# numpy 1.1 us, and 1.6 us for dtypes that numpy does not know.
_BLOCKS: Final = tuple(ctypes.c_ubyte * (1 << power) for power in range(48))


@dataclass(slots=True)
class Encoded:
    """A value, ready to be sent.

    Attributes:
        control: msgpack, see `kinds`.
        buffers: C-contiguous views of bytes, in the order to send them; they keep their
            memory alive.  They view the sender's tensors: a write to a tensor before
            the buffers are sent would be sent.
        gradient_tensors: the tensors that require a gradient, each once, in the order
            in which `Codec.decode` reports them.
        bytes_copied: bytes that were gathered in user space.
        shared: storages that travel by reference, by key; None if there are none.
        loses_gradient: returns where in the value a tensor is whose gradient cannot
            follow it, and why; None if there is none.
        copies: copies from devices into `buffers` that must be made before they are
            sent.
    """

    control: bytes
    buffers: list[memoryview]
    gradient_tensors: list[torch.Tensor]
    bytes_copied: int
    shared: dict[bytes, torch.UntypedStorage] | None = field(default=None, kw_only=True)
    copies: Sequence[Copy] = field(default=(), kw_only=True)
    loses_gradient: Callable[[], str | None] | None = field(default=None, kw_only=True)

    @property
    def payload_bytes(self) -> int:
        """Bytes of the buffers."""
        return sum(buffer.nbytes for buffer in self.buffers)

    def pack(self) -> Encoded:
        """Return the message in the form to send: `self` if it has no codec."""
        return self


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
