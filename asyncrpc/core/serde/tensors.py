"""torch.Tensor <-> an entry of the table and a buffer, without a copy on either side.

An entry is `[TENSOR, flags, dtype, shape, buffer]` if the tensor is contiguous and has
its buffer to itself; otherwise offset and strides, in elements, follow, and a device if
it was not the host's.  Sending views the tensor's own memory.  Receiving makes the
tensor over the received buffer; tensors of one buffer share one storage.

A tensor is sent with its memory layout, conjugate and negative bits aside, unless
`spans` decides to gather it.  Strides of dimensions of size 1 mean nothing and may
change.

The reader trusts nothing: it checks in Python's unbounded integers that every element
lies inside its buffer, before torch sees a number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch

from asyncrpc.core.serde.encoded import (
    OutgoingBuffers,
    Span,
    Stager,
    clusters,
    reach,
    span_of,
    view_memory,
)
from asyncrpc.core.serde.kinds import (
    CONJUGATE,
    ENTRY_SHARED,
    ENTRY_TENSOR,
    META,
    NEGATIVE,
    NO_BUFFER,
)
from asyncrpc.core.serde.unsendable import Unsendable
from asyncrpc.errors import DecodeError

Entry = list[Any]

DTYPES: Final = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}
NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}

# numpy's name for each dtype: from_numpy makes a tensor over given memory the fastest
# (0.9 us; frombuffer and a view take 1.6).  Dtypes that numpy does not know are read as
# integers of their size and viewed (1 us more).
KNOWN_DTYPES: Final = frozenset(
    f"{kind}{bits}"
    for kind, sizes in {
        "uint": (8, 16, 32, 64),
        "int": (8, 16, 32, 64),
        "float": (16, 32, 64),
        "complex": (64, 128),
    }.items()
    for bits in sizes
) | {"bool"}
_CARRIERS: Final = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}
_BITS: Final = {size: DTYPES[name] for size, name in _CARRIERS.items()}
_QUANTIZED: Final = frozenset({"qint8", "quint8", "qint32", "quint4x2", "quint2x4"})
_NUMPY: Final[dict[str, tuple[np.dtype[Any], torch.dtype | None]]] = {
    name: (np.dtype(name), None)
    if name in KNOWN_DTYPES
    else (np.dtype(_CARRIERS[dtype.itemsize]), dtype)
    for name, dtype in DTYPES.items()
    if name not in _QUANTIZED
}
_UINT8: Final = np.dtype("uint8")
DEVICE_AT: Final = 7  # in an entry, if the tensor was not in host memory
SIZE_MAX: Final = 1 << 62  # of a dimension, an offset or a stride: fits torch's int64
# A byte per element is needed to find whether two views with holes share an element;
# beyond this many elements we assume that they do.
OVERLAP_ELEMENTS_MAX: Final = 1 << 28


class TensorWriter:
    """Gathers the tensors of one message, then lays them out in buffers together."""

    __slots__ = ("_outbox", "_pending", "_stager")

    def __init__(self, outbox: OutgoingBuffers, stager: Stager) -> None:
        self._outbox = outbox
        self._stager = stager
        self._pending: list[_OutgoingTensor] = []

    def add(self, index: int, tensor: torch.Tensor, flags: int) -> None:
        """Note a strided, unquantized tensor, whose entry will be at `index`."""
        if tensor.is_cpu and not has_its_memory(tensor):
            raise Unsendable(
                tensor,
                f"the storage of a tensor of {tensor.nbytes} bytes was resized to"
                f" {tensor.untyped_storage().nbytes()}; send the tensor before its"
                " memory is freed",
            )
        self._pending.append(_OutgoingTensor(index, tensor, flags))

    def add_flags(self, indices: set[int], flags: int) -> None:
        """Add flags to the tensors whose entries will be at `indices`."""
        for item in self._pending:
            if item.index in indices:
                item.flags |= flags

    def uses_memory_at(self, addresses: set[int]) -> bool:
        """Return whether a tensor that `add` was given is in one of these storages."""
        return any(
            item.tensor.untyped_storage().data_ptr() in addresses
            for item in self._pending
            if item.tensor.is_cpu and item.tensor.nbytes
        )

    def finish(self, table: list[Any]) -> None:
        """Write the entries of all tensors that `add` was given."""
        pending, self._pending = self._pending, []
        if len(pending) == 1:
            return self._place_alone(table, pending[0])
        storages: dict[int, list[_OutgoingTensor]] = {}
        for item in pending:
            if item.tensor.is_cpu and item.tensor.nbytes:
                key = item.tensor.untyped_storage()._cdata  # noqa: SLF001
                storages.setdefault(key, []).append(item)
            else:
                self._place_alone(table, item)
        for items in storages.values():
            self._place_storage(table, items)
        return None

    # --- one tensor in its own buffer ------------------------------------------------

    def _place_alone(self, table: list[Any], item: _OutgoingTensor) -> None:
        tensor = item.tensor
        if not tensor.is_cpu:
            return self._place_foreign(table, item)
        if not tensor.nbytes:
            table[item.index] = self._entry(item, NO_BUFFER)
        elif tensor.is_contiguous():
            storage = tensor.untyped_storage()
            view = view_memory(storage, tensor.data_ptr(), tensor.nbytes)
            table[item.index] = self._entry(item, self._outbox.add(view))
        else:
            self._place_view(table, item)
        return None

    def _place_foreign(self, table: list[Any], item: _OutgoingTensor) -> None:
        """Write a tensor of another device; a `meta` tensor has no bytes at all."""
        tensor = item.tensor
        if tensor.is_meta:
            item.flags |= META
            strides = list(tensor.stride())
            table[item.index] = [*self._entry(item, NO_BUFFER), 0, strides]
            return
        device = str(tensor.device)
        copy = self._stager.to_host(tensor)
        self._outbox.copies.append(copy)
        item.tensor = copy.target
        self._place_alone(table, item)
        entry = table[item.index]
        if len(entry) == 5:  # noqa: PLR2004 - contiguous
            entry += [0, None]
        entry.append(device)

    def _place_view(self, table: list[Any], item: _OutgoingTensor) -> None:
        span = item.span()
        if span.goes_raw():
            self._place_shared(table, [item], span)
            return
        item.tensor = self._gather(item.tensor)
        self._place_alone(table, item)

    def _gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gather the elements; strides keep their order, zero strides stay zero."""
        shape, strides = tensor.shape, tensor.stride()
        once = [size if step else 1 for size, step in zip(shape, strides, strict=True)]
        core = tensor.detach().as_strided(once, strides)
        carrier = _BITS.get(tensor.itemsize)
        if carrier is None or tensor.is_complex():
            dense = core.clone()
        else:  # torch can copy integers, but not every dtype: int4, say
            dense = core.view(carrier).clone().view(tensor.dtype)
        self._outbox.bytes_copied += dense.nbytes
        return dense.expand(shape)

    # --- several tensors of one storage ----------------------------------------------

    def _place_storage(self, table: list[Any], items: list[_OutgoingTensor]) -> None:
        if len(items) == 1:
            return self._place_alone(table, items[0])
        for union, members in clusters([item.span() for item in items]):
            together = [items[member] for member in members]
            if len(together) == 1:
                self._place_alone(table, together[0])
            elif union.goes_raw() or _overlap(together, union):
                self._place_cluster(table, together, union)
            else:
                for item in together:
                    self._place_alone(table, item)
        return None

    def _place_cluster(
        self, table: list[Any], items: list[_OutgoingTensor], union: Span
    ) -> None:
        first = items[0]
        if not union.goes_raw() and all(item.lies_like(first) for item in items):
            gathered = self._gather(first.tensor)
            for item in items:
                item.tensor = gathered
            union = first.span()
        self._place_shared(table, items, union)

    def _place_shared(
        self, table: list[Any], items: list[_OutgoingTensor], union: Span
    ) -> None:
        """Send the bytes of `union`; each entry says where in them its elements are."""
        # Views of several dtypes: each offset must stay a multiple of its item's size.
        start = union.start
        start -= start % max(item.tensor.itemsize for item in items)
        storage = items[0].tensor.untyped_storage()
        address = storage.data_ptr() + start
        buffer = self._outbox.add(view_memory(storage, address, union.stop - start))
        for item in items:
            tensor = item.tensor
            offset = tensor.storage_offset() - start // tensor.itemsize
            entry = self._entry(item, buffer)
            table[item.index] = [*entry, offset, list(tensor.stride())]

    def _entry(self, item: _OutgoingTensor, buffer: int) -> Entry:
        tensor, flags = item.tensor, item.flags
        if tensor.is_neg():
            flags |= NEGATIVE
        if tensor.is_conj():
            flags |= CONJUGATE
        return [ENTRY_TENSOR, flags, NAMES[tensor.dtype], list(tensor.shape), buffer]


class _OutgoingTensor:
    """A tensor on its way out, the index of its entry, and its flags."""

    __slots__ = ("flags", "index", "tensor")

    def __init__(self, index: int, tensor: torch.Tensor, flags: int) -> None:
        self.index = index
        self.tensor = tensor
        self.flags = flags

    def span(self) -> Span:
        tensor = self.tensor
        offset = int(tensor.storage_offset())
        return span_of(tensor.shape, tensor.stride(), offset, tensor.itemsize)

    def lies_like(self, other: _OutgoingTensor) -> bool:
        own, theirs = self.tensor, other.tensor
        return (
            own.dtype == theirs.dtype
            and own.shape == theirs.shape
            and own.stride() == theirs.stride()
            and own.storage_offset() == theirs.storage_offset()
            and own.is_conj() == theirs.is_conj()
            and own.is_neg() == theirs.is_neg()
        )


def has_its_memory(tensor: torch.Tensor) -> bool:
    """Return whether every element of a strided tensor lies in its storage.

    `storage.resize_` may free the memory of a tensor, which does not notice: reading an
    element then crashes the process.
    """
    if not tensor.numel():  # its offset may be anything
        return True
    stop = tensor.storage_offset() + reach(tensor.shape, tensor.stride())
    return stop * tensor.itemsize <= tensor.untyped_storage().nbytes()


def _overlap(items: Sequence[_OutgoingTensor], union: Span) -> bool:
    """Return whether two of the views share an element; if in doubt, they do."""
    item_bytes = items[0].tensor.itemsize
    elements = (union.stop - union.start) // item_bytes
    if elements > OVERLAP_ELEMENTS_MAX:
        return True
    if any(item.tensor.itemsize != item_bytes for item in items):
        return True
    covered = torch.zeros(elements, dtype=torch.bool, device="cpu")
    for item in items:
        tensor = item.tensor
        strides = tensor.stride()
        shape = [
            size if step else 1
            for size, step in zip(tensor.shape, strides, strict=True)
        ]
        offset = tensor.storage_offset() - union.start // item_bytes
        view = covered.as_strided(shape, strides, offset)
        if bool(view.any()):
            return True
        view.fill_(True)  # noqa: FBT003
    return False


def shared_entry(tensor: torch.Tensor, flags: int, buffer: int) -> Entry:
    """Return the entry of a tensor over shared memory, whose key is in `buffer`."""
    if tensor.is_neg():
        flags |= NEGATIVE
    if tensor.is_conj():
        flags |= CONJUGATE
    shape, strides = list(tensor.shape), list(tensor.stride())
    place = [tensor.storage_offset(), strides]
    return [ENTRY_SHARED, flags, NAMES[tensor.dtype], shape, buffer, *place]


class TensorReader:
    """Makes tensors over the received buffers of one message."""

    __slots__ = ("_bases", "_buffers", "_dimensions_max")

    def __init__(self, buffers: Sequence[memoryview], dimensions_max: int) -> None:
        self._buffers = buffers
        self._dimensions_max = dimensions_max
        self._bases: dict[int, torch.Tensor] = {}

    def read(self, entry: Entry) -> torch.Tensor:
        """Return the tensor of an entry, in host memory, without a gradient."""
        flags, name, shape, index = entry[1:5]
        if len(entry) == 5 and index != NO_BUFFER:  # noqa: PLR2004
            tensor = self._contiguous(name, shape, index)
        else:
            tensor = self._strided(entry)
        if flags & (CONJUGATE | NEGATIVE):
            tensor = _with_bits(tensor, flags)
        return tensor

    def read_shared(self, entry: Entry, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return a tensor over shared memory; see `read`."""
        flags, name, shape, _, offset, strides = entry[1:7]
        dtype = _dtype(name)
        self._check_place(shape, strides, offset)
        stop = (offset + reach(shape, strides)) * dtype.itemsize
        if stop > storage.nbytes():
            raise DecodeError(
                f"a tensor reaches byte {stop} of {storage.nbytes()} shared bytes"
            )
        tensor = torch.empty(0, dtype=dtype, device=storage.device)
        tensor.set_(storage, offset, tuple(shape), tuple(strides))
        return _with_bits(tensor, flags) if flags & (CONJUGATE | NEGATIVE) else tensor

    def buffer(self, index: int) -> memoryview:
        """Return a received buffer."""
        if type(index) is not int or not 0 <= index < len(self._buffers):
            raise DecodeError(
                f"a tensor is in buffer {index!r} of {len(self._buffers)}"
            )
        return self._buffers[index]

    def _contiguous(self, name: str, shape: list[int], index: int) -> torch.Tensor:
        buffer = self.buffer(index)
        if buffer.readonly:
            return self._over(index, _dtype(name), shape, _dense(shape), 0)
        try:
            seen_as, viewed_as = _NUMPY[name]
        except (KeyError, TypeError):
            raise _unknown(name) from None
        # numpy checks the sizes, and that the array lies in the buffer.
        tensor = torch.from_numpy(np.ndarray(shape, seen_as, buffer))
        if tensor.nbytes != buffer.nbytes:
            raise DecodeError(f"{buffer.nbytes} bytes arrived for shape {shape}")
        if tensor.data_ptr() % seen_as.itemsize:  # a buffer cut out of a larger one
            tensor = tensor.clone()
        return tensor if viewed_as is None else tensor.view(viewed_as)

    def _strided(self, entry: Entry) -> torch.Tensor:
        flags, name, shape, index, *rest = entry[1:]
        offset, strides = (rest + [0, None][len(rest) :])[:2]
        dtype = _dtype(name)
        if flags & META:
            self._check_shape(shape)
            self._check(strides)
            if reach(shape, strides) * dtype.itemsize > SIZE_MAX:
                raise DecodeError(
                    f"a tensor of {shape} with strides {strides} overflows"
                )
            return torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        if index == NO_BUFFER:
            self._check_shape(shape)
            if 0 not in shape:
                raise DecodeError(f"no bytes arrived for shape {shape}")
            return torch.empty(shape, dtype=dtype, device="cpu")
        strides = _dense(shape) if strides is None else strides
        return self._over(index, dtype, shape, strides, offset)

    def _over(
        self,
        index: int,
        dtype: torch.dtype,
        shape: list[int],
        strides: list[int],
        offset: int,
    ) -> torch.Tensor:
        """Make a tensor over buffer `index`, on the storage of all tensors there."""
        self._check_place(shape, strides, offset)
        size_bytes = self.buffer(index).nbytes
        stop = (offset + reach(shape, strides)) * dtype.itemsize
        if stop > size_bytes:
            raise DecodeError(
                f"a tensor reaches byte {stop} of a buffer of {size_bytes}"
            )
        storage = self._base(index).untyped_storage()
        tensor = torch.empty(0, dtype=dtype, device="cpu")
        return tensor.set_(storage, offset, tuple(shape), tuple(strides))

    def _base(self, index: int) -> torch.Tensor:
        base = self._bases.get(index)
        if base is None:
            buffer = self.buffer(index)
            array = np.ndarray(buffer.nbytes, _UINT8, buffer)
            base = torch.from_numpy(array.copy() if buffer.readonly else array)
            if base.data_ptr() % 16:  # the largest item: complex128
                base = base.clone()
            self._bases[index] = base
        return base

    def _check_place(self, shape: list[Any], strides: list[Any], offset: Any) -> None:
        self._check_shape(shape)
        self._check([*strides, offset])
        if len(shape) != len(strides):
            raise DecodeError(
                f"a tensor has {len(strides)} strides for {len(shape)} dimensions"
            )

    def _check(self, numbers: list[Any]) -> None:
        """Refuse all but a short list of sizes that fit torch's integers."""
        if type(numbers) is not list or len(numbers) > self._dimensions_max + 1:
            raise DecodeError(f"sizes or strides of a tensor are {numbers!r:.60}")
        for number in numbers:
            if type(number) is not int or not 0 <= number < SIZE_MAX:
                raise DecodeError(f"a tensor's size, stride or offset is {number!r}")

    def _check_shape(self, shape: list[int]) -> None:
        self._check(shape)
        if math.prod(size or 1 for size in shape) > SIZE_MAX:  # strides may be zero
            raise DecodeError(f"a tensor's sizes overflow: {shape}")


def _with_bits(tensor: torch.Tensor, flags: int) -> torch.Tensor:
    if flags & CONJUGATE:
        tensor = tensor.conj()
    if flags & NEGATIVE:
        tensor = torch._neg_view(tensor)  # noqa: SLF001 - there is no public way
    return tensor


def _dtype(name: Any) -> torch.dtype:
    if isinstance(name, str) and name in _NUMPY:
        return DTYPES[name]
    raise _unknown(name)


def _unknown(name: Any) -> DecodeError:
    return DecodeError(
        f"dtype {name!r:.40} is unknown to this worker; does it run the same torch?"
    )


def _dense(shape: Any) -> list[int]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return strides[::-1]
