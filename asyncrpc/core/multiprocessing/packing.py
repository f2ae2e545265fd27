"""Values <-> items of a queue: a pickle, and the memory that it refers to.

The pickle (protocol 5) leaves out the memory of tensors and of large numpy arrays; each
such *part* is a row of a table in front of it, and says where that memory is:

- in a block of the queue: it was copied there, or was there already, because it came
  out of that queue; then nothing is copied;
- behind a descriptor that goes along, if it is in shared memory of its own
  (`asyncrpc.share`, `Tensor.share_memory_`).

Parts are storages, not tensors: views of one storage in one item stay views of one
storage, and only the bytes that they span are copied.

Processes that share a queue trust each other: a pickle can run anything.

Source: PEP 574 for parts beside a pickle; torch/multiprocessing/reductions.py for
tensors that require a gradient.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Sequence
from ctypes import memmove
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch.multiprocessing import reductions

from asyncrpc.core.multiprocessing.arguments import refuse_graph, refusing
from asyncrpc.core.serde.encoded import key_of, mark, reach
from asyncrpc.core.serde.layouts import is_known, put_together, take_apart
from asyncrpc.core.serde.shared import MappedFiles
from asyncrpc.core.shm.channel import Channel, Hold, TakenItem
from asyncrpc.core.shm.machine.ring import (
    BLOCKS_MAX,
    DESCRIPTORS_MAX,
    fits_slot,
    outside_bytes,
)
from asyncrpc.core.shm.machine.shelf import NONE, PAGE_BYTES
from asyncrpc.core.shm.passing import close_all
from asyncrpc.errors import UsageError

# A part of at least so many bytes has a block of its own, which is free again when it
# is dropped; smaller parts share a block with each other and with the pickle.
OWN_BLOCK_BYTES: Final = 64 << 10
ARRAY_BYTES_MIN: Final = 4096  # of a numpy array that stays out of the pickle
_ALIGN_BYTES: Final = 64  # as torch aligns its own memory

# A body: the numbers of parts and of keys; a row for each part: where it is (an offset,
# or the number of a descriptor), its length, how much of its storage was left out
# before it (behind a descriptor: its offset there), and its kind; a key for each part
# behind a descriptor; the pickle.
_HEAD: Final = struct.Struct("<II")
_ROW: Final = struct.Struct("<QQQI")
_IN_BLOCK: Final = 0  # kinds of parts
_ARRAY: Final = 1
_BEHIND_DESCRIPTOR: Final = 2
_NO_PARTS: Final = _HEAD.pack(0, 0)
_NO_KEY: Final = bytes(16)

_PARAMETER: Final = 1  # flags of a tensor
_REQUIRES_GRAD: Final = 2
_CONJUGATE: Final = 4
_NEGATIVE: Final = 8
_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)

Part: TypeAlias = tuple[torch.UntypedStorage, int]


class _Source:
    """A part on its way out: bytes `start` to `stop` of the memory at `address`."""

    __slots__ = ("address", "kind", "owner", "start", "stop", "token", "where")

    def __init__(self, owner: Any, address: int, nbytes: int, kind: int) -> None:
        self.owner = owner  # keeps the memory
        self.address = address
        self.start, self.stop = nbytes, 0  # nothing yet
        self.kind = kind
        self.where = NONE  # offset in the queue's memory, or number of a descriptor
        self.token = pickle.PickleBuffer(bytearray())

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    def span(self, start: int, stop: int) -> None:
        """Extend the part to these bytes."""
        # Views may have several dtypes: each offset stays a multiple of the item size.
        start -= start % _ALIGN_BYTES
        self.start, self.stop = min(self.start, start), max(self.stop, stop)


class _Sources:
    """The parts of one item, in the order in which its pickle names them."""

    def __init__(self, channel: Channel) -> None:
        self.collected: list[_Source] = []
        self._channel = channel
        self._storages: dict[int, _Source] = {}
        self._tokens: dict[int, _Source] = {}

    def of_storage(self, storage: torch.UntypedStorage) -> _Source:
        """Return the part of a storage that is not empty."""
        source = self._storages.get(storage._cdata)  # noqa: SLF001
        if source is not None:
            return source
        nbytes = storage.nbytes()
        source = _Source(storage, storage.data_ptr(), nbytes, _IN_BLOCK)
        source.where = self._channel.offset_of(source.address)
        if source.where != NONE:
            source.span(0, nbytes)
        elif key_of(storage) is not None or storage.is_shared():
            source.kind = _BEHIND_DESCRIPTOR
            source.span(0, nbytes)
        self._storages[storage._cdata] = source  # noqa: SLF001
        self._tokens[id(source.token)] = source
        return source

    def leave_out(self, buffer: pickle.PickleBuffer) -> bool:
        """Take a buffer out of the pickle; return True if it must stay there."""
        source = self._tokens.get(id(buffer))
        if source is None:
            memory = np.frombuffer(buffer.raw(), np.uint8)
            if memory.nbytes < ARRAY_BYTES_MIN:
                return True
            address: int = memory.__array_interface__["data"][0]
            source = _Source(memory, address, memory.nbytes, _ARRAY)
            source.span(0, memory.nbytes)
            source.where = self._channel.offset_of(address)
        self.collected.append(source)
        return False


class _TensorlessPickler(pickle.Pickler):
    """Leaves the memory of tensors out."""

    def __init__(self, file: io.BytesIO, sources: _Sources) -> None:
        super().__init__(file, protocol=5, buffer_callback=sources.leave_out)
        self._sources = sources

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._reduce(value)
        if type(value) is _Source:
            return _itself, (value.token,)
        return NotImplemented

    def _reduce(self, tensor: torch.Tensor) -> Any:
        refuse_graph(tensor)
        if type(tensor) not in _PLAIN or tensor.is_meta:
            return NotImplemented  # torch's own way: by value
        if not tensor.is_cpu:
            return reductions.reduce_tensor(tensor)  # type: ignore[no-untyped-call]  # torch's
        if tensor.layout is not torch.strided or tensor.is_quantized:
            return self._take_apart(tensor)
        if tensor.is_nested:
            return NotImplemented
        source, offset, item_bytes = None, 0, tensor.itemsize
        if tensor.numel():
            source = self._sources.of_storage(tensor.untyped_storage())
            offset = int(tensor.storage_offset())
            start = offset * item_bytes
            count = reach(tensor.shape, tensor.stride())
            source.span(start, start + count * item_bytes)
        shape, strides = tuple(tensor.shape), tensor.stride()
        flags = _flags_of(tensor)
        return _strided, (
            *(source, tensor.dtype, offset, shape, strides),
            *(flags, tensor.grad),
        )

    def _take_apart(self, tensor: torch.Tensor) -> Any:
        if not is_known(tensor):
            return NotImplemented
        parts: list[torch.Tensor] = []

        def add(part: torch.Tensor) -> int:
            parts.append(part)
            return len(parts) - 1

        entry = take_apart(tensor, 0, add)
        return _assembled, (entry, parts, _flags_of(tensor), tensor.grad)


class PackedItem:
    """An item that is packed, but not put yet."""

    def __init__(self, value: object, channel: Channel, known: MappedFiles) -> None:
        self._channel = channel
        sources, file = _Sources(channel), io.BytesIO()
        with refusing("the item cannot be put into a queue"):
            _TensorlessPickler(file, sources).dump(value)
        self._pickle = file.getvalue()
        self._sources = sources.collected
        self._holds: list[Hold] | None = None
        self._blocks: list[int] = []
        self._descriptors: list[int] = []
        self._body = _NO_PARTS + self._pickle
        if self._sources or not fits_slot(0, len(self._body)):
            self._plan(known)
        else:
            self._holds = []

    def _plan(self, known: MappedFiles) -> None:
        """Decide where each part goes."""
        channel = self._channel
        self._descriptors, self._keys = _pass_along(self._sources, known)
        self._held = {  # parts that are in the queue's memory already, held by tensors
            channel.layout.block_at(source.where): None
            for source in self._sources
            if source.where != NONE and source.kind != _BEHIND_DESCRIPTOR
        }
        self._copied = [source for source in self._sources if source.where == NONE]
        self._alone = [
            source for source in self._copied if source.nbytes >= OWN_BLOCK_BYTES
        ]
        self._sizes = self._block_sizes()
        _refuse_too_large(self._sizes, len(self._held), channel.layout.limit_bytes)

    def advance(self) -> bool:
        """Put the item if there is room; else take the steps that are possible."""
        channel = self._channel
        if self._holds is None:
            holds = channel.reserve(self._sizes) if self._sizes else []
            if holds is None:
                return False
            self._fill(holds)
            self._holds = holds
        return channel.put(self._blocks, self._body, self._descriptors)

    def _block_sizes(self) -> list[int]:
        """Return the sizes of the blocks to take; the common block is last."""
        sizes = [source.nbytes for source in self._alone]
        small = [source for source in self._copied if source.nbytes < OWN_BLOCK_BYTES]
        if not small and fits_slot(len(self._held) + len(sizes), self._body_bytes()):
            return sizes
        common = self._outside_bytes(len(self._held) + len(sizes) + 1)
        for source in small:
            common = _aligned(common) + source.nbytes
        return [*sizes, common]

    def _body_bytes(self) -> int:
        keys_bytes = sum(map(len, self._keys))
        rows_bytes = len(self._sources) * _ROW.size
        return _HEAD.size + rows_bytes + keys_bytes + len(self._pickle)

    def _outside_bytes(self, blocks: int) -> int:
        body_bytes = self._body_bytes()
        return 0 if fits_slot(blocks, body_bytes) else outside_bytes(blocks, body_bytes)

    def _fill(self, holds: Sequence[Hold]) -> None:
        """Copy the parts into the blocks, and write their places into the body."""
        layout, base = self._channel.layout, self._channel.slab.address
        self._blocks = [*self._held, *(hold.block for hold in holds)]
        starts = [layout.start_of(hold.block) for hold in holds]
        common = starts[-1] if len(starts) > len(self._alone) else 0
        common += self._outside_bytes(len(self._blocks))
        for source in self._copied:
            if source.nbytes >= OWN_BLOCK_BYTES:
                source.where = starts.pop(0)
            else:
                source.where = _aligned(common)
                common = source.where + source.nbytes
            memmove(base + source.where, source.address + source.start, source.nbytes)
        rows = (
            _ROW.pack(source.where, source.nbytes, source.start, source.kind)
            for source in self._sources
        )
        head = _HEAD.pack(len(self._sources), len(self._keys))
        self._body = b"".join((head, *rows, *self._keys, self._pickle))
        if not fits_slot(len(self._blocks), len(self._body)):
            self._channel.write_outside(self._blocks, self._body)


def unpack(item: TakenItem, channel: Channel, known: MappedFiles) -> Any:
    """Return the value of an item; its tensors are over the queue's memory."""
    body = item.body
    if body[: _HEAD.size] == _NO_PARTS:
        return pickle.loads(body[_HEAD.size :])  # noqa: S301  see above
    try:
        count, keys = _HEAD.unpack_from(body)
        at = _HEAD.size
        rows = [_ROW.unpack_from(body, at + _ROW.size * row) for row in range(count)]
        at += _ROW.size * count
        memory = memoryview(body)
        segment_keys = (
            bytes(memory[at + 16 * key : at + 16 * key + 16]) for key in range(keys)
        )
        holds = {hold.block: hold for hold in item.holds}
        parts: list[Part | memoryview] = []
        for where, nbytes, start, kind in rows:
            if kind == _BEHIND_DESCRIPTOR:
                storage = known.storage_at(item.descriptors[where], start, nbytes)
                key = next(segment_keys)
                if key != _NO_KEY and key_of(storage) is None:
                    mark(storage, key)
                parts.append((storage, 0))
                continue
            view = holds[channel.layout.block_at(where)].view(where, nbytes)
            if kind == _ARRAY:
                parts.append(view)
            else:
                storage = torch.frombuffer(view, dtype=torch.uint8).untyped_storage()
                parts.append((storage, start))
        return pickle.loads(memory[at + 16 * keys :], buffers=parts)  # noqa: S301  ours
    finally:
        close_all(item.descriptors)


def _pass_along(
    sources: Sequence[_Source], known: MappedFiles
) -> tuple[list[int], list[bytes]]:
    """Number the descriptors of parts; return them, and the keys of the parts."""
    numbers: dict[int, int] = {}
    keys: list[bytes] = []
    for source in sources:
        if source.kind == _BEHIND_DESCRIPTOR:
            descriptor, start = known.add(source.owner)
            source.where = numbers.setdefault(descriptor, len(numbers))
            source.start, source.stop = start, start + source.nbytes
            keys.append(key_of(source.owner) or _NO_KEY)
    return list(numbers), keys


def _refuse_too_large(sizes: Sequence[int], held: int, limit_bytes: int) -> None:
    total = sum(-(-size // PAGE_BYTES) * PAGE_BYTES for size in sizes)
    if total > limit_bytes:
        raise UsageError(
            f"an item takes {total:,} bytes, but the whole queue has {limit_bytes:,}: "
            "use a larger `memory_bytes`, or share the tensors beforehand"
        )
    if held + len(sizes) > min(BLOCKS_MAX, DESCRIPTORS_MAX):
        raise UsageError(
            f"an item has {held + len(sizes):,} separate tensors; the limit is "
            f"{BLOCKS_MAX:,}: put them in several items"
        )


def _aligned(offset: int) -> int:
    return (offset + _ALIGN_BYTES - 1) & -_ALIGN_BYTES


def _flags_of(tensor: torch.Tensor) -> int:
    flags = _PARAMETER if isinstance(tensor, torch.nn.Parameter) else 0
    flags |= _REQUIRES_GRAD if tensor.requires_grad else 0
    flags |= _CONJUGATE if tensor.is_conj() else 0
    return flags | (_NEGATIVE if tensor.is_neg() else 0)


# --- functions that a pickle calls ---------------------------------------------------


def _itself(part: Part) -> Part:
    return part


def _strided(  # noqa: PLR0917  as a pickle has it: by position
    part: Part | None,
    dtype: torch.dtype,
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    flags: int,
    gradient: torch.Tensor | None,
) -> torch.Tensor:
    if part is None:
        tensor = torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
    else:
        storage, start = part
        tensor = torch.empty(0, dtype=dtype, device="cpu")
        tensor.set_(storage, offset - start // dtype.itemsize, shape, strides)
    if flags & _CONJUGATE:
        tensor = tensor.conj()
    if flags & _NEGATIVE:
        tensor = torch._neg_view(tensor)  # noqa: SLF001
    return _finished(tensor, flags, gradient)


def _assembled(
    entry: list[Any],
    parts: list[torch.Tensor],
    flags: int,
    gradient: torch.Tensor | None,
) -> torch.Tensor:
    return _finished(put_together(entry, parts.__getitem__), flags, gradient)


def _finished(
    tensor: torch.Tensor, flags: int, gradient: torch.Tensor | None
) -> torch.Tensor:
    requires_grad = bool(flags & _REQUIRES_GRAD)
    if flags & _PARAMETER:
        tensor = torch.nn.Parameter(tensor, requires_grad)
    elif requires_grad:
        tensor.requires_grad_()
    if gradient is not None:
        tensor.grad = gradient
    return tensor
