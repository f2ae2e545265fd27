"""Shortcuts for the values of most calls: numbers, text, lists of them, a few tensors.

They write and read the same bytes as `encoding` and `decoding`, without the work that
only other values need.  One plain tensor takes 1.9 us to write and 1.6 us to read here,
7.2 us and 4.5 us there.  All other values are left to them: then the result is None (or
`UNREAD`), and nothing has been done.

A plain tensor is exactly a `torch.Tensor`, in host memory.  If it is not contiguous,
such as an expanded gradient, it is sent with its strides if `spans` allows that.  Of
several, each must be the whole of a storage of its own.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, NamedTuple

import msgpack
import numpy as np
import torch

from asyncrpc.core.serde import kinds
from asyncrpc.core.serde.bounds import COUNTED_BYTES_MIN
from asyncrpc.core.serde.encoded import Encoded, key_of, reach, span_of, view_memory
from asyncrpc.core.serde.exceptions import words_of
from asyncrpc.core.serde.shared import KEY_BYTES, FindStorage
from asyncrpc.core.serde.tensors import (
    DTYPES,
    KNOWN_DTYPES,
    NAMES,
    SIZE_MAX,
    has_its_memory,
    shared_entry,
)
from asyncrpc.core.torch_modes import (
    dispatch_count,
    function_count,
    has_defaults,
    is_inference,
)
from asyncrpc.errors import DecodeError, EncodeError, Outcome

_TENSOR: Final = torch.Tensor
_STRIDED: Final = torch.strided
# Shapes and messages remembered, per table; a full table is cleared.
REMEMBERED_MAX: Final = 1024
REMEMBERED_BYTES_MAX: Final = 1024  # of one of them
DIMENSIONS_MAX: Final = 64  # numpy's limit; `encoding` refuses tensors with more
# Levels of lists in lists that are inspected, and their length.
_FLAT_DEPTH: Final = 3
_FLAT_LENGTH: Final = 32
_DEEP_DEPTH: Final = 5  # of containers with tensors or tuples, the arguments included
# Longer byte strings get a buffer: they are sent without a copy, and received beside
# the control part, whose size is limited.
INLINE_BYTES_MAX: Final = 16 << 10
TENSORS_MAX: Final = 32

# Elements of a list of which even numbers take less time in a pickle: 1.5 ms for
# 100 000, here 4 ms.  Text takes more.
_BULK_LENGTH: Final = 4096
_TEXT: Final = frozenset({str, bytes})
_CONTAINERS: Final = frozenset({list, tuple, dict})
_DEEP: Final = _CONTAINERS | {bytes}
_CONTAINERS_MAX: Final = 30  # that are looked into; a pickle may be better for more

_SCALARS: Final = frozenset({type(None), bool, int, float, str})
_are_scalars: Final = _SCALARS.issuperset
_PACKER_BYTES_MAX: Final = 1 << 20  # a packer that has packed more is replaced
REFERENCES: Final = tuple(  # the first, made once: a named tuple takes 0.4 us
    msgpack.ExtType(kinds.REFERENCE, index.to_bytes(4, "little"))
    for index in range(256)
)
_NOTHING: Final = b"\x92\x90\x80"  # msgpack of [[], {}], the arguments of many calls
_NONE: Final = b"\xc0"
FLAT_NOTHING: Final = kinds.FLAT + _NOTHING
FLAT_NONE: Final = kinds.FLAT + _NONE

# The common trees: one tensor alone, and nothing but that many tensors as arguments.
ALONE: Final = msgpack.packb(REFERENCES[0])
ARGUMENTS: Final = tuple(
    msgpack.packb([REFERENCES[:count], {}]) for count in range(TENSORS_MAX + 1)
)
ARGUMENT: Final = ARGUMENTS[1]

UNREAD: Final = object()
_ITEM_BYTES_MAX: Final = 16  # complex128
_PLAIN_KINDS: Final = (kinds.ENTRY_TENSOR, kinds.ENTRY_SHARED)
_PLAIN_FLAGS: Final = (0, kinds.REQUIRES_GRAD)
_INDICES: Final = {bytes(reference.data): at for at, reference in enumerate(REFERENCES)}
_COMMON: Final = {  # with the number of tensors
    ALONE: (1, ALONE),
    **{tree: (count, tree) for count, tree in enumerate(ARGUMENTS)},
}
_IS_TUPLE_BYTE: Final = kinds.ROOT_IS_TUPLE >> 24
_ARRAYS: Final = frozenset(  # first bytes of msgpack's arrays
    bytes((first,)) for first in (*range(0x90, 0xA0), 0xDC, 0xDD)
)
_DEPTH_MAX: Final = 4  # of tuples: each level takes a C stack frame of 40 KiB
_array: Final = np.ndarray
_from_numpy: Final = torch.from_numpy
OnGradient = Callable[[torch.Tensor], torch.Tensor]


class _ViewTable(bytes):
    """The table of a tensor that is not contiguous, with its length in front.

    Attributes:
        nbytes: bytes from the first element to the last, both included.
    """

    nbytes: int


def _new_packer() -> msgpack.Packer:
    return msgpack.Packer(
        default=_lower_tuple,
        strict_types=True,
        unicode_errors="surrogatepass",
        autoreset=True,
    )


def _lower_tuple(value: Any) -> msgpack.ExtType:
    if type(value) is not tuple:
        raise ValueError  # an integer of more than 64 bits, say
    packed = msgpack.packb(
        list(value),
        default=_lower_tuple,
        strict_types=True,
        unicode_errors="surrogatepass",
    )
    return msgpack.ExtType(kinds.TUPLE, packed)


class QuickWriter:
    """The shortcuts of one codec; its caches are bounded and only save time."""

    __slots__ = (
        "_control_bytes_max",
        "_joined_tables",
        "_packer",
        "_pickles",
        "_places",
        "_tables",
        "_tensors_max",
        "_views",
    )

    def __init__(
        self,
        *,
        pickles: bool = False,
        objects_max: int = TENSORS_MAX,
        control_bytes_max: int = sys.maxsize,
    ) -> None:
        """Begin with empty caches.

        Args:
            control_bytes_max: of a control part; a longer one is left to `encoding`.
        """
        self._pickles = pickles
        self._control_bytes_max = control_bytes_max
        self._tensors_max = min(objects_max, TENSORS_MAX)
        # A table of one tensor, with its length in front, by dtype and shape.
        self._tables: dict[tuple[torch.dtype, torch.Size, bool], bytes] = {}
        self._joined_tables: dict[tuple[bytes, ...], bytes] = {}
        self._views: dict[Any, _ViewTable | None] = {}
        self._places: dict[Any, bytes] = {}
        self._packer = _new_packer()

    def write(self, value: Any) -> Encoded | None:
        """Return `value`, encoded, or None."""
        if value is None:
            return Encoded(FLAT_NONE, [], [], 0)
        kind = type(value)
        try:
            if kind is list and len(value) == 2 and type(value[0]) is list:  # noqa: PLR2004
                encoded = self._write_arguments(value)
            elif kind is _TENSOR:
                encoded = self._framed(self._table_of(value), ALONE, value)
            else:
                flat = self.write_flat(value)
                encoded = (
                    self._write_deep(value)
                    if flat is None
                    else Encoded(flat, [], [], 0)
                )
        except Exception as error:
            raise unencodable(words_of(error)) from error
        if encoded is None or len(encoded.control) > self._control_bytes_max:
            return None
        return encoded

    def _write_arguments(  # noqa: C901, PLR0911  (it is hot)
        self, value: list[Any]
    ) -> Encoded | None:
        args, kwargs = value
        if type(kwargs) is not dict:
            return self._write_deep(value)
        if not kwargs:
            if not args:
                return Encoded(FLAT_NOTHING, [], [], 0)
            if len(args) == 1 and type(args[0]) is _TENSOR:
                return self._framed(self._table_of(args[0]), ARGUMENT, args[0])
        tensors: list[torch.Tensor] = []
        seen: list[Any] = []
        for part in args:
            if type(part) is _TENSOR:
                tensors.append(part)
            elif type(part) not in _SCALARS and not _is_flat(part, seen):
                return self._write_deep(value) if type(part) in _DEEP else None
        if kwargs and not _is_flat(kwargs, seen):
            return self._write_deep(value)
        if len(seen) > 1 and self._pickles and _repeats(seen):
            return None
        if tensors:
            return self._write_around(tensors, args, kwargs)
        tree = self._pack(value)
        return None if tree is None else Encoded(kinds.FLAT + tree, [], [], 0)

    def _write_around(
        self, tensors: list[torch.Tensor], args: list[Any], kwargs: dict[str, Any]
    ) -> Encoded | None:
        """Return the encoded parts of arguments of which some are tensors."""
        if len(tensors) > self._tensors_max:
            return None
        if len(args) == len(tensors) and not kwargs:
            return self._framed_together(tensors, ARGUMENTS[len(tensors)])
        if len(tensors) == 1:
            lowered = [REFERENCES[0] if type(a) is _TENSOR else a for a in args]
        else:
            rest = iter(REFERENCES)
            lowered = [next(rest) if type(a) is _TENSOR else a for a in args]
        tree = self._pack([lowered, kwargs])
        return None if tree is None else self._framed_together(tensors, tree)

    def _write_deep(self, value: Any) -> Encoded | None:
        """Return a value with tuples in it, or with tensors in containers."""
        is_tuple = type(value) is tuple
        tensors: list[torch.Tensor] = []
        seen: list[Any] = []
        parts = _lowered(value if is_tuple else (value,), seen, tensors, _DEEP_DEPTH)
        if parts is None or len(tensors) > self._tensors_max:
            return None
        if self._pickles and _repeats(seen):
            return None
        tree = self._pack(parts if is_tuple else parts[0])
        if tree is None:
            return None
        if not tensors:
            front = kinds.FLAT_TUPLE if is_tuple else kinds.FLAT
            return Encoded(front + tree, [], [], 0)
        encoded = self._framed_together(tensors, tree)
        if encoded is not None and is_tuple:
            encoded.control = kinds.as_tuple(encoded.control)
        return encoded

    def write_flat(self, value: Any) -> bytes | None:
        """Return the control part of scalars, or of lists and dictionaries of them."""
        seen: list[Any] = []
        if type(value) is tuple:
            for part in value:
                if type(part) not in _SCALARS and not _is_flat(part, seen):
                    return None
            front, tree = kinds.FLAT_TUPLE, list(value)
        else:
            if not _is_flat(value, seen):
                return None
            front, tree = kinds.FLAT, value
        if len(seen) > 1 and self._pickles and _repeats(seen):
            return None
        packed = self._pack(tree)
        return None if packed is None else front + packed

    def _pack(self, tree: Any) -> bytes | None:
        try:
            packed: bytes = self._packer.pack(tree)
        except (OverflowError, ValueError):
            self._packer.reset()
            return None
        if len(packed) > _PACKER_BYTES_MAX:  # its buffer never shrinks
            self._packer = _new_packer()
        return packed

    def _table_of(self, tensor: torch.Tensor) -> bytes | None:
        """Return the table of a plain tensor with its length in front."""
        if function_count():  # modes of torch that would see what is done here
            return None
        dtype = tensor.dtype
        if (
            not tensor.is_cpu
            or tensor.layout is not _STRIDED
            or tensor.is_nested
            or (dtype.is_complex and tensor.is_conj())
            or tensor.is_neg()
            or (tensor.__dict__ and self._pickles)  # attributes go in a pickle
        ):
            return None
        if not tensor.is_contiguous():
            return self._view_table_of(tensor)
        key = dtype, tensor.shape, tensor.requires_grad
        table = self._tables.get(key)
        if table is None:
            table = self._new_table(tensor)
            if table and len(table) <= REMEMBERED_BYTES_MAX:
                if len(self._tables) >= REMEMBERED_MAX:
                    self._tables.clear()
                self._tables[key] = table
        return table

    def _view_table_of(self, tensor: torch.Tensor) -> _ViewTable | None:
        """Return the table of a tensor that is not contiguous; None if not plain."""
        key = tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad
        if key in self._views:
            return self._views[key]
        if len(self._views) >= REMEMBERED_MAX:
            self._views.clear()
        table = self._views[key] = _new_view_table(tensor)
        return table

    def _new_table(self, tensor: torch.Tensor) -> bytes | None:
        name = NAMES[tensor.dtype]
        if name not in KNOWN_DTYPES or not tensor.nbytes:
            return None
        if tensor.dim() > DIMENSIONS_MAX:
            return None
        entry = [kinds.ENTRY_TENSOR, _flags(tensor), name, list(tensor.shape), 0]
        return _table_with(entry)

    def _framed(
        self, table: bytes | None, tree: bytes, tensor: torch.Tensor
    ) -> Encoded | None:
        """Return the encoded parts of one tensor, sent by value or by reference."""
        if table is None:
            return None
        storage = tensor.untyped_storage()
        gradients = [tensor] if tensor.requires_grad else []
        key = key_of(storage)
        strides = None
        nbytes = tensor.nbytes
        if type(table) is _ViewTable:
            strides, nbytes = tensor.stride(), table.nbytes
        if key is None:
            # 0.1 us: memory that `storage.resize_` has freed must not be read.
            is_whole = storage.nbytes() == nbytes and not tensor.storage_offset()
            if not is_whole and not has_its_memory(tensor):
                return None
            view = view_memory(storage, tensor.data_ptr(), nbytes)
            return Encoded(table + tree, [view], gradients, 0)
        place = self._place_of(tensor, strides) + tree
        known = {key: storage}
        return Encoded(place, [memoryview(key)], gradients, 0, shared=known)

    def _framed_together(
        self, tensors: list[torch.Tensor], tree: bytes
    ) -> Encoded | None:
        """Return the encoded parts of tensors that share no memory."""
        if len(tensors) == 1:
            return self._framed(self._table_of(tensors[0]), tree, tensors[0])
        tables, views, gradients, addresses = [], [], [], set()
        for tensor in tensors:
            table = self._table_of(tensor)
            if table is None or type(table) is _ViewTable:
                return None
            storage, nbytes = tensor.untyped_storage(), tensor.nbytes
            if (
                storage.nbytes() != nbytes
                or tensor.storage_offset()
                or key_of(storage) is not None
            ):
                return None
            address = tensor.data_ptr()
            addresses.add(address)
            tables.append(table)
            views.append(view_memory(storage, address, nbytes))
            if tensor.requires_grad:
                gradients.append(tensor)
        if len(addresses) < len(tensors):
            return None
        return Encoded(self._joined(tuple(tables)) + tree, views, gradients, 0)

    def _joined(self, tables: tuple[bytes, ...]) -> bytes:
        """Return the table of several tensors, from the table of each."""
        table = self._joined_tables.get(tables)
        if table is None:
            entries = [msgpack.unpackb(table[4:])[0] for table in tables]
            for index, entry in enumerate(entries):
                entry[4] = index
            table = _table_with(*entries)
            if len(self._joined_tables) >= REMEMBERED_MAX:
                self._joined_tables.clear()
            self._joined_tables[tables] = table
        return table

    def _place_of(self, tensor: torch.Tensor, strides: tuple[int, ...] | None) -> bytes:
        """Return the table of a plain tensor in shared memory, with its length."""
        flags = _flags(tensor)
        known = tensor.dtype, tensor.shape, strides, tensor.storage_offset(), flags
        table = self._places.get(known)
        if table is None:
            table = _table_with(shared_entry(tensor, flags, 0))
            if len(self._places) >= REMEMBERED_MAX:
                self._places.clear()
            self._places[known] = table
        return table


def unencodable(problem: str) -> EncodeError:
    """Return the error about a value that cannot be sent."""
    return EncodeError(f"cannot be sent: {problem}", outcome=Outcome.NOT_EXECUTED)


def _new_view_table(tensor: torch.Tensor) -> _ViewTable | None:
    name, strides = NAMES[tensor.dtype], tensor.stride()
    if name not in KNOWN_DTYPES or not tensor.nbytes or tensor.dim() > DIMENSIONS_MAX:
        return None
    span = span_of(tensor.shape, strides, 0, tensor.itemsize)
    if not span.goes_raw():
        return None
    shape = list(tensor.shape)
    entry = [kinds.ENTRY_TENSOR, _flags(tensor), name, shape, 0, 0, list(strides)]
    table = _ViewTable(_table_with(entry))
    if len(table) > REMEMBERED_BYTES_MAX:
        return None
    table.nbytes = span.stop
    return table


def _table_with(*entries: list[Any]) -> bytes:
    """Return the table of some tensors, with its length in front."""
    packed: bytes = msgpack.packb(entries)
    return len(packed).to_bytes(4, "little") + packed


def _flags(tensor: torch.Tensor) -> int:
    return kinds.REQUIRES_GRAD if tensor.requires_grad else 0


def _lowered(
    parts: Collection[Any], seen: list[Any], tensors: list[torch.Tensor], depth: int
) -> list[Any] | None:
    """Return a few parts with references in place of their tensors, or None."""
    lowered: list[Any] = []
    for part in parts:
        kind = type(part)
        below = part
        if kind is _TENSOR:
            if len(tensors) == TENSORS_MAX:
                return None
            below = REFERENCES[len(tensors)]
            tensors.append(part)
        elif kind is bytes:
            if len(part) > INLINE_BYTES_MAX:
                return None
        elif kind not in _SCALARS:
            below = _lowered_container(part, seen, tensors, depth)
            if below is None:
                return None
        lowered.append(below)
    return lowered


def _lowered_container(
    part: Any, seen: list[Any], tensors: list[torch.Tensor], depth: int
) -> Any:
    kind, noted = type(part), len(seen)
    if _is_flat(part, seen):
        return part
    del seen[noted:]
    if kind not in _CONTAINERS or len(part) > _FLAT_LENGTH:
        return None
    if not depth or noted == _CONTAINERS_MAX:
        return None
    if kind is dict and not _are_scalars(map(type, part)):
        return None
    seen.append(part)
    below = _lowered(part.values() if kind is dict else part, seen, tensors, depth - 1)
    if below is None or kind is list:
        return below
    return tuple(below) if kind is tuple else dict(zip(part, below, strict=True))


def _repeats(seen: list[Any]) -> bool:
    """Return whether a container occurs twice: a pickle keeps that it is one."""
    if len(seen) == 2:  # noqa: PLR2004 - often; a set takes longer
        return seen[0] is seen[1]
    return len(set(map(id, seen))) < len(seen)


def _is_flat(part: Any, seen: list[Any]) -> bool:
    """Return whether this is a scalar, or lists and dictionaries of scalars only.

    Those without others in them are added to `seen`: if one with others occurs twice,
    so do they.
    """
    kind = type(part)
    if kind is list:
        if len(part) > _BULK_LENGTH and is_bulk(part):
            return False
        inside = part
    elif kind is dict and _are_scalars(map(type, part)):
        inside = part.values()
    else:
        return kind in _SCALARS
    if _are_scalars(map(type, inside)):
        seen.append(part)
        return True
    return _are_flat(inside, _FLAT_DEPTH, seen)


def _are_flat(parts: Collection[Any], depth: int, seen: list[Any]) -> bool:
    """Return whether each of a few parts `_is_flat`, down to `depth` levels."""
    if not depth or len(parts) > _FLAT_LENGTH:
        return False
    for part in parts:
        kind = type(part)
        if kind in _SCALARS:
            continue
        if kind is list:
            inside = part
        elif kind is dict and _are_scalars(map(type, part)):
            inside = part.values()
        else:
            return False
        if _are_scalars(map(type, inside)):
            seen.append(part)
        elif not _are_flat(inside, depth - 1, seen):
            return False
    return True


def is_bulk(value: Any) -> bool:
    """Return whether a list or dictionary is better pickled, whatever else is in it."""
    return (
        len(value) > _BULK_LENGTH
        and type(value) is list
        and type(value[0]) not in _TEXT
    )


class SharedLocation(NamedTuple):
    """Where a tensor lies in shared memory."""

    dtype: torch.dtype
    offset: int
    strides: tuple[int, ...]
    stop: int  # in bytes


class Form(NamedTuple):
    """The meaning of a table that holds one plain tensor."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    nbytes: int  # of its buffer
    requires_grad: bool
    strides: tuple[int, ...] | None = None  # in bytes; None: it is contiguous
    place: SharedLocation | None = None  # if the buffer is the key of shared memory


class QuickReader:
    """Reads messages; its caches are bounded and only save time.

    Attributes:
        find_shared: finds storages that messages refer to; None: they are refused.
    """

    __slots__ = ("_forms", "_tensors_max", "_wholes", "find_shared")

    def __init__(self, *, objects_max: int = TENSORS_MAX) -> None:
        self.find_shared: FindStorage | None = None
        self._tensors_max = min(objects_max, TENSORS_MAX)
        self._forms: dict[bytes, Sequence[Form]] = {}  # by the table
        # By the whole control part, where the tree is a common one.
        self._wholes: dict[bytes, tuple[Sequence[Form], bytes]] = {}

    def read(  # noqa: PLR0911  (it is hot)
        self,
        control: bytes,
        buffers: Sequence[memoryview],
        on_gradient: OnGradient | None = None,
    ) -> Any:
        """Return the value, or `UNREAD`; then `on_gradient` has not been called.

        A malformed message is `UNREAD` too: `decoding` says what is wrong with it.  So
        is one that is long enough to do harm, which `decoding` counts.
        """
        if len(control) > COUNTED_BYTES_MIN:
            return UNREAD
        if not buffers:
            return _read_flat(control)
        forms, tree = self._wholes.get(control) or self._split(control)
        if len(forms) != len(buffers) or (
            not has_defaults()
            if on_gradient is not None
            else function_count() or dispatch_count() or is_inference()
        ):  # modes of torch that would see the tensors, or change them
            return UNREAD
        if tree is ARGUMENT or tree is ALONE:
            form = forms[0]
            tensor = _tensor_of(form, buffers[0], self.find_shared)
            if tensor is None:
                return UNREAD
            if form.requires_grad:
                tensor = _finished(tensor, on_gradient)
            return tensor if tree is ALONE else [[tensor], {}]
        value = _read_several(forms, buffers, tree, self.find_shared, on_gradient)
        if value is not UNREAD and control[3] & _IS_TUPLE_BYTE:
            return tuple(value)
        return value

    def _split(self, control: bytes) -> tuple[Sequence[Form], bytes]:
        """Return the forms of a message's table, and the tree behind it."""
        header = int.from_bytes(control[:4], "little")
        is_tuple = header & kinds.ROOT_IS_TUPLE
        stop = 4 + (header ^ is_tuple)
        if stop > REMEMBERED_BYTES_MAX:
            return (), b""
        table, tree = control[4:stop], control[stop:]
        forms = self._forms.get(table)
        if forms is None:
            if len(self._forms) >= REMEMBERED_MAX:
                self._forms.clear()
            forms = self._forms[table] = _forms_of(table, self._tensors_max)
        if is_tuple:
            return (forms, tree) if tree[:1] in _ARRAYS else ((), b"")
        common = _COMMON.get(tree)
        if common is None:
            return forms, tree
        if len(self._wholes) >= REMEMBERED_MAX:
            self._wholes.clear()
        count, tree = common
        self._wholes[control] = whole = (forms if len(forms) == count else ()), tree
        return whole


def _tensor_of(
    form: Form, buffer: memoryview, find_shared: FindStorage | None
) -> torch.Tensor | None:
    """Return a tensor over a buffer, or None: `decoding` says why not."""
    dtype, shape, nbytes, _, strides, place = form
    if buffer.nbytes != nbytes or buffer.readonly:
        return None
    if place is not None:
        return _read_shared(form, place, bytes(buffer), find_shared)
    tensor = _from_numpy(_array(shape, dtype, buffer, 0, strides))
    return None if tensor.data_ptr() % dtype.itemsize else tensor


def _finished(tensor: torch.Tensor, on_gradient: OnGradient | None) -> torch.Tensor:
    """Let a tensor require a gradient, as it did at the sender."""
    return tensor.requires_grad_() if on_gradient is None else on_gradient(tensor)


def _read_shared(
    form: Form, place: SharedLocation, key: bytes, find_shared: FindStorage | None
) -> torch.Tensor | None:
    if find_shared is None:
        return None
    try:
        storage = find_shared(key)
    except DecodeError:
        return None
    if place.stop > storage.nbytes():
        return None
    tensor = torch.empty(0, dtype=place.dtype, device=storage.device)
    return tensor.set_(storage, place.offset, form.shape, place.strides)


def _read_several(
    forms: Sequence[Form],
    buffers: Sequence[memoryview],
    tree: bytes,
    find_shared: FindStorage | None,
    on_gradient: OnGradient | None,
) -> Any:
    """Return the value around some tensors, or `UNREAD`."""
    tensors: list[torch.Tensor] = []
    gradients: list[int] = []
    for form in forms:
        at = len(tensors)
        tensor = _tensor_of(form, buffers[at], find_shared)
        if tensor is None:
            return UNREAD
        if form.requires_grad:
            gradients.append(at)
        tensors.append(tensor)
    is_common = tree is ARGUMENTS[len(tensors)]
    value = [tensors, {}] if is_common else _unpack(tree, _lifting(tensors))
    if value is UNREAD or not gradients:
        return value
    for at in gradients:  # only now: see `UNREAD`
        tensors[at] = _finished(tensors[at], on_gradient)
    return value if is_common else _unpack(tree, _lifting(tensors))


class _NotFlat(Exception):  # noqa: N818  (a signal, not an error)
    """A tree holds values that msgpack itself does not know."""


def _read_flat(control: bytes) -> Any:
    if control == FLAT_NOTHING:
        return [[], {}]
    if control == FLAT_NONE:
        return None
    front = control[:4]
    if front == kinds.FLAT:
        return _unpack(memoryview(control)[4:], _lift_alone)
    if front != kinds.FLAT_TUPLE:
        return UNREAD
    value = _unpack(memoryview(control)[4:], _lift_alone)
    return tuple(value) if type(value) is list else UNREAD


def _unpack(tree: bytes | memoryview, lift: Callable[[int, bytes], Any]) -> Any:
    try:
        return msgpack.unpackb(
            tree,
            ext_hook=lift,
            strict_map_key=False,
            unicode_errors="surrogatepass",
        )
    except Exception:  # noqa: BLE001  (`decoding` says what is wrong with it)
        return UNREAD


def _lift_alone(code: int, packed: bytes) -> Any:
    return _lifting([])(code, packed)


def _lifting(
    tensors: list[torch.Tensor], depth: int = 0
) -> Callable[[int, bytes], Any]:
    """Return what reads references to tensors, and tuples in tuples."""

    def lift(code: int, packed: bytes) -> Any:
        if code == kinds.REFERENCE:
            return tensors[_INDICES[packed]]
        if code != kinds.TUPLE or depth > _DEPTH_MAX:
            raise _NotFlat
        parts = _unpack(packed, _lifting(tensors, depth + 1))
        if type(parts) is not list:
            raise _NotFlat
        return tuple(parts)

    return lift


def _forms_of(table: bytes, count_max: int) -> Sequence[Form]:
    """Return the forms of a table of plain tensors, else none; trusts nothing."""
    try:
        entries = msgpack.unpackb(table)
        forms = [_form_of(at, entry) for at, entry in enumerate(entries)]
    except Exception:  # noqa: BLE001  (`decoding` says what is wrong with it)
        return ()
    plain = [form for form in forms if form is not None]
    if len(plain) < len(forms) or len(forms) > count_max:
        return ()
    if len(forms) > 1 and any(form.strides or form.place for form in plain):
        return ()
    return plain


def _form_of(at: int, entry: list[Any]) -> Form | None:
    """Return the form of entry `at` if that is of a plain tensor, else None."""
    kind, flags, name, shape, buffer, *place = entry
    numbers = kind, flags, buffer
    is_exact = all(type(number) is int for number in numbers)  # False == 0
    if not is_exact or kind not in _PLAIN_KINDS or flags not in _PLAIN_FLAGS:
        return None
    if buffer != at:
        return None
    if type(name) is not str or name not in KNOWN_DTYPES or not _is_shape(shape):
        return None
    dtype = np.dtype(name)
    if flags and dtype.kind not in "fc":  # this dtype cannot require a gradient
        return None
    form = Form(dtype, tuple(shape), dtype.itemsize * math.prod(shape), bool(flags))
    is_shared = kind == kinds.ENTRY_SHARED
    return _placed(form, name, place, is_shared) if place or is_shared else form


def _placed(
    form: Form,
    name: str,
    place: list[Any],
    is_shared: bool,  # noqa: FBT001
) -> Form | None:
    """Return the form of a tensor with an offset and strides, shared or not."""
    dtype, shape = form.dtype, form.shape
    if not _is_place(shape, place):
        return None
    offset, strides = place
    stop = (offset + reach(shape, strides)) * dtype.itemsize
    if is_shared:
        location = SharedLocation(DTYPES[name], offset, tuple(strides), stop)
        return form._replace(nbytes=KEY_BYTES, place=location)
    if offset:  # as for one of several tensors of a buffer
        return None
    steps = tuple(stride * dtype.itemsize for stride in strides)
    return form._replace(nbytes=stop, strides=steps)


def _is_shape(shape: Any) -> bool:
    """Return whether this is the shape of a tensor with elements."""
    if type(shape) is not list or len(shape) > DIMENSIONS_MAX:
        return False
    return all(type(size) is int and size >= 1 for size in shape)


def _is_place(shape: Sequence[int], place: list[Any]) -> bool:
    """Return whether this is an offset and strides that fit into some memory."""
    if len(place) != 2 or type(place[1]) is not list:  # noqa: PLR2004
        return False
    offset, strides = place
    if len(strides) != len(shape) or type(offset) is not int or offset < 0:
        return False
    if not all(type(stride) is int and stride >= 0 for stride in strides):
        return False
    return offset + reach(shape, strides) <= SIZE_MAX // _ITEM_BYTES_MAX
