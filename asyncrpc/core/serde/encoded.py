"""An encoded value: its control part, its buffers, and the memory that they view.

Which bytes of a storage a buffer has, `Span` and `clusters` decide: the span of a view,
holes included, is sent raw with its strides if it is at most twice the covered bytes,
or at most 64 KiB. Otherwise the elements are gathered.  Views of one storage form a
cluster if their union satisfies the rule, or if they overlap; a cluster is sent as one
buffer, so that aliases stay aliases.

Serde handles host bytes only, and never waits: for a tensor on a device the message has
a host buffer, and a `Copy` that fills it before the message is sent.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

import torch

from asyncrpc.core.serde import kinds
from asyncrpc.core.serde.by_value import CodeName
from asyncrpc.errors import EncodeError, Outcome

_PACKED_IN_BYTE: Final = kinds.PACKED >> 24

_MARK: Final = "_asyncrpc_shared"


class Copy(NamedTuple):
    """A copy of a tensor to the host that has still to be made.

    Attributes:
        source: the tensor, on a device.
        target: in host memory, of the same shape and dtype, contiguous or as dense as
            the source; its content is still undefined.
        mark: the device's own object (an event, say) for when the source is ready.
    """

    source: torch.Tensor
    target: torch.Tensor
    mark: Any = None


class Stager(Protocol):
    """Chooses host memory for tensors on devices."""

    def to_host(self, tensor: torch.Tensor) -> Copy:
        """Return the copy to make of `tensor` (any shape, on a device); do not wait."""
        ...


class HostStager:
    """The stager of a codec without devices: it refuses every tensor."""

    def to_host(self, tensor: torch.Tensor) -> Copy:
        """Refuse."""
        raise EncodeError(
            f"a tensor on device {str(tensor.device)!r} cannot be sent from here;"
            " send tensor.cpu()",
            outcome=Outcome.NOT_EXECUTED,
        )


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
        code: functions and classes in it that the peer must have before it reads them.
    """

    control: bytes
    buffers: list[memoryview]
    gradient_tensors: list[torch.Tensor]
    bytes_copied: int
    shared: dict[bytes, torch.UntypedStorage] | None = field(default=None, kw_only=True)
    copies: Sequence[Copy] = field(default=(), kw_only=True)
    code: Sequence[CodeName] = field(default=(), kw_only=True)
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


# Below this a gather costs more than the bytes it saves: it takes 3 us plus the copy,
# and 64 KiB pass a loopback socket in about 10 us.
RAW_BYTES_MAX: Final = 64 << 10
RAW_RATIO_MAX: Final = 2


class Span(NamedTuple):
    """Bytes `start` to `stop` of a storage, of which `covered` are elements."""

    start: int
    stop: int
    covered: int

    def goes_raw(self) -> bool:
        """Return whether the span is sent raw, holes included."""
        size_bytes = self.stop - self.start
        return size_bytes <= max(RAW_BYTES_MAX, RAW_RATIO_MAX * self.covered)

    def join(self, other: Span) -> Span:
        """Return the union; its covered bytes are at most its length."""
        start, stop = min(self.start, other.start), max(self.stop, other.stop)
        return Span(start, stop, min(stop - start, self.covered + other.covered))


def reach(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return how many elements lie from the first to the last, both included."""
    last = 0
    for size, stride in zip(shape, strides, strict=True):
        if size == 0:
            return 0
        last += (size - 1) * stride
    return last + 1


def span_of(
    shape: Sequence[int], strides: Sequence[int], offset: int, item_bytes: int
) -> Span:
    """Return the span of a view of at least one element; `offset` is in elements."""
    size_bytes = reach(shape, strides) * item_bytes
    covered = item_bytes
    for size, stride in zip(shape, strides, strict=True):
        if stride:
            covered *= size
    start = offset * item_bytes
    return Span(start, start + size_bytes, min(covered, size_bytes))


def clusters(spans: Sequence[Span]) -> list[tuple[Span, list[int]]]:
    """Divide the views of one storage into clusters that travel together."""
    grouped: list[tuple[Span, list[int]]] = []
    for index in sorted(range(len(spans)), key=spans.__getitem__):
        span = spans[index]
        if grouped:
            union, members = grouped[-1]
            joined = union.join(span)
            if span.start < union.stop or joined.goes_raw():
                members.append(index)
                grouped[-1] = joined, members
                continue
        grouped.append((span, [index]))
    return grouped


def key_of(storage: torch.UntypedStorage) -> bytes | None:
    """Return the key of a storage; None if it is not sent by reference."""
    return getattr(storage, _MARK, None)


def mark(storage: torch.UntypedStorage, key: bytes) -> None:
    """Send a storage by reference from now on."""
    setattr(storage, _MARK, key)


def is_packed(control: bytes | memoryview) -> bool:
    """Return whether the buffers of a message are packed."""
    return len(control) >= kinds.LENGTH_BYTES and bool(control[3] & _PACKED_IN_BYTE)
