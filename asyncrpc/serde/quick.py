"""Shortcuts for the values of most calls: numbers, text, lists of them, one tensor.

They write and read the same bytes as `encoding` and `decoding`, without the work that
only other values need.  One plain tensor takes 1.9 us to write and 1.6 us to read here,
7.2 us and 4.5 us there.  All other values are left to them: then the result is None (or
`UNREAD`), and nothing has been done.

A plain tensor is exactly a `torch.Tensor`, in host memory.  If it is not contiguous,
such as an expanded gradient, it is sent with its strides if `spans` allows that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, NamedTuple

import msgpack
import numpy as np
import torch

from asyncrpc.errors import DecodeError
from asyncrpc.serde import kinds
from asyncrpc.serde.outgoing_buffers import view_memory
from asyncrpc.serde.shared import KEY_BYTES, SharedStorages, key_of
from asyncrpc.serde.spans import reach, span_of
from asyncrpc.serde.tensors import (
    DTYPES,
    KNOWN_DTYPES,
    NAMES,
    SIZE_MAX,
    has_its_memory,
    shared_entry,
)
from asyncrpc.torch_modes import has_defaults

UNREAD: Final = object()
# Shapes and messages remembered, per table; a full table is cleared.
_REMEMBERED_MAX: Final = 1024
_REMEMBERED_BYTES_MAX: Final = 256  # of one of them
DIMENSIONS_MAX: Final = 64  # numpy's limit; `encoding` refuses tensors with more
# Levels of lists in lists that are inspected, and their length.
_FLAT_DEPTH: Final = 3
_FLAT_LENGTH: Final = 32

# Elements of a list of which even numbers take less time in a pickle: 1.5 ms for
# 100 000, here 4 ms.  Text takes more.
_BULK_LENGTH: Final = 4096
_TEXT: Final = frozenset({str, bytes})

_SCALARS: Final = frozenset({type(None), bool, int, float, str})
_are_scalars: Final = _SCALARS.issuperset
_PACKER_BYTES_MAX: Final = 1 << 20  # a packer that has packed more is replaced
_REFERENCE: Final = msgpack.ExtType(kinds.REFERENCE, bytes(4))
_NOTHING: Final = b"\x92\x90\x80"  # msgpack of [[], {}], the arguments of many calls
_NONE: Final = b"\xc0"
_FLAT_NOTHING: Final = kinds.FLAT + _NOTHING
_FLAT_NONE: Final = kinds.FLAT + _NONE
_ITEM_BYTES_MAX: Final = 16  # complex128
_PLAIN_KINDS: Final = (kinds.ENTRY_TENSOR, kinds.ENTRY_SHARED)
_PLAIN_FLAGS: Final = (0, kinds.REQUIRES_GRAD)

# The common trees around one tensor.
_ALONE: Final = msgpack.packb(_REFERENCE)
_ARGUMENT: Final = msgpack.packb([[_REFERENCE], {}])
_COMMON: Final = {one: one for one in (_ALONE, _ARGUMENT)}


# The control part and the buffers of a message; the tensors in it that require a
# gradient; the storages that it refers to, if any.
Written = tuple[
    bytes,
    list[memoryview],
    list[torch.Tensor],
    dict[bytes, torch.UntypedStorage] | None,
]
OnGradient = Callable[[torch.Tensor], torch.Tensor]


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


class _ViewTable(bytes):
    """The table of a tensor that is not contiguous, with its length in front.

    Attributes:
        nbytes: bytes from the first element to the last, both included.
    """

    nbytes: int


def _new_packer() -> msgpack.Packer:
    return msgpack.Packer(
        strict_types=True, unicode_errors="surrogatepass", autoreset=True
    )


class Quick:
    """The shortcuts of one codec; its caches are bounded and only save time."""

    __slots__ = (
        "_forms",
        "_packer",
        "_pickles",
        "_places",
        "_tables",
        "_views",
        "_wholes",
    )

    def __init__(self, *, pickles: bool = False) -> None:
        """Begin with empty caches.

        Args:
            pickles: leave to pickle what it does better: long lists, and those that
                occur twice.
        """
        self._pickles = pickles
        # A table of one tensor, with its length in front, by dtype and shape.
        self._tables: dict[tuple[torch.dtype, torch.Size, bool], bytes] = {}
        self._views: dict[Any, _ViewTable | None] = {}
        self._places: dict[Any, bytes] = {}
        self._forms: dict[bytes, Form | None] = {}  # by the table
        # By the whole control part, where the tree is a common one.
        self._wholes: dict[bytes, tuple[Form | None, bytes]] = {}
        self._packer = _new_packer()

    # --- writing ---------------------------------------------------------------------

    def write(self, value: Any) -> Written | None:
        """Return the encoded parts of `value`, or None."""
        if value is None:
            return kinds.FLAT + _NONE, [], [], None
        kind = type(value)
        if kind is torch.Tensor:
            table = self._table_of(value)
            return self._framed(table, _ALONE, value)
        if kind is list and len(value) == 2 and type(value[0]) is list:  # noqa: PLR2004
            return self._write_arguments(value)
        flat = self.write_flat(value)
        return None if flat is None else (flat, [], [], None)

    def _write_arguments(self, value: list[Any]) -> Written | None:
        args, kwargs = value
        if not args and not kwargs and type(kwargs) is dict:
            return _FLAT_NOTHING, [], [], None
        tensor = None
        seen: list[int] | None = [] if self._pickles else None
        for part in args:
            if not _is_flat(part, seen):
                if type(part) is not torch.Tensor or tensor is not None:
                    return None
                tensor = part
        if type(kwargs) is not dict or (kwargs and not _is_flat(kwargs, seen)):
            return None
        if seen and _repeats(seen):
            return None
        if tensor is not None:
            return self._write_around(tensor, args, kwargs)
        tree = self._pack(value)
        return None if tree is None else (kinds.FLAT + tree, [], [], None)

    def _write_around(
        self, tensor: torch.Tensor, args: list[Any], kwargs: dict[str, Any]
    ) -> Written | None:
        """Return the encoded parts of arguments of which one is a tensor."""
        table = self._table_of(tensor)
        if table is None:
            return None
        if len(args) == 1 and not kwargs:
            return self._framed(table, _ARGUMENT, tensor)
        lowered = [_REFERENCE if part is tensor else part for part in args]
        tree = self._pack([lowered, kwargs])
        return None if tree is None else self._framed(table, tree, tensor)

    def write_flat(self, value: Any) -> bytes | None:
        """Return the control part of scalars, or of lists and dictionaries of them."""
        seen: list[int] | None = [] if self._pickles else None
        if type(value) is tuple:
            if not all(_is_flat(part, seen) for part in value):
                return None
            front, tree = kinds.FLAT_TUPLE, list(value)
        else:
            if not _is_flat(value, seen):
                return None
            front, tree = kinds.FLAT, value
        if seen and _repeats(seen):
            return None
        packed = self._pack(tree)
        return None if packed is None else front + packed

    def _pack(self, tree: Any) -> bytes | None:
        try:
            packed: bytes = self._packer.pack(tree)
        except (OverflowError, ValueError):  # an integer of more than 64 bits, say
            self._packer.reset()
            return None
        if len(packed) > _PACKER_BYTES_MAX:  # its buffer never shrinks
            self._packer = _new_packer()
        return packed

    def _table_of(self, tensor: torch.Tensor) -> bytes | None:
        """Return the table of a plain tensor with its length in front."""
        if (
            not has_defaults()  # of torch: its modes would see what is done here
            or not tensor.is_cpu
            or tensor.layout is not torch.strided
            or tensor.is_nested
            or tensor.is_conj()
            or tensor.is_neg()
            or (tensor.__dict__ and self._pickles)  # attributes go in a pickle
        ):
            return None
        if not tensor.is_contiguous():
            return self._view_table_of(tensor)
        key = tensor.dtype, tensor.shape, tensor.requires_grad
        table = self._tables.get(key)
        if table is None:
            table = self._new_table(tensor)
            if table and len(table) <= _REMEMBERED_BYTES_MAX:
                if len(self._tables) >= _REMEMBERED_MAX:
                    self._tables.clear()
                self._tables[key] = table
        return table

    def _view_table_of(self, tensor: torch.Tensor) -> _ViewTable | None:
        """Return the table of a tensor that is not contiguous; None if not plain."""
        key = tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad
        if key in self._views:
            return self._views[key]
        if len(self._views) >= _REMEMBERED_MAX:
            self._views.clear()
        found = self._views[key] = _new_view_table(tensor)
        return found

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
    ) -> Written | None:
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
            return table + tree, [view], gradients, None
        place = self._place_of(tensor, strides) + tree
        return place, [memoryview(key)], gradients, {key: storage}

    def _place_of(self, tensor: torch.Tensor, strides: tuple[int, ...] | None) -> bytes:
        """Return the table of a plain tensor in shared memory, with its length."""
        flags = _flags(tensor)
        known = tensor.dtype, tensor.shape, strides, tensor.storage_offset(), flags
        table = self._places.get(known)
        if table is None:
            table = _table_with(shared_entry(tensor, flags, 0))
            if len(self._places) >= _REMEMBERED_MAX:
                self._places.clear()
            self._places[known] = table
        return table

    # --- reading ---------------------------------------------------------------------

    def read(
        self,
        control: bytes,
        buffers: Sequence[memoryview],
        shared: SharedStorages | None = None,
        on_gradient: OnGradient | None = None,
    ) -> Any:
        """Return the value, or `UNREAD`."""
        if not buffers:
            return _read_flat(control)
        if len(buffers) != 1:
            return UNREAD
        form, tree = self._wholes.get(control) or self._split(control)
        tensor = None if form is None else _tensor_of(form, buffers[0], shared)
        if form is None or tensor is None:
            return UNREAD
        if tree is not _ALONE and tree is not _ARGUMENT:
            value = _read_around(tree, tensor)
            if value is UNREAD or not form.requires_grad:
                return value
            # Only now: nothing may have been done if the result is `UNREAD`.
            return _read_around(tree, _finished(tensor, on_gradient))
        if form.requires_grad:
            tensor = _finished(tensor, on_gradient)
        return tensor if tree is _ALONE else [[tensor], {}]

    def _split(self, control: bytes) -> tuple[Form | None, bytes]:
        """Return the form of a message's table, and the tree behind it."""
        stop = 4 + int.from_bytes(control[:4], "little")
        if stop > _REMEMBERED_BYTES_MAX:
            return None, b""
        table, tree = control[:stop], control[stop:]
        form = self._forms[table] if table in self._forms else self._learn(table)
        common = _COMMON.get(tree)
        if common is None:
            return form, tree
        if len(self._wholes) >= _REMEMBERED_MAX:
            self._wholes.clear()
        self._wholes[control] = form, common
        return form, common

    def _learn(self, table: bytes) -> Form | None:
        form = _form_of(table)
        if len(self._forms) >= _REMEMBERED_MAX:
            self._forms.clear()
        self._forms[table] = form
        return form


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
    if len(table) > _REMEMBERED_BYTES_MAX:
        return None
    table.nbytes = span.stop
    return table


def _table_with(entry: list[Any]) -> bytes:
    """Return the table of one tensor, with its length in front."""
    packed: bytes = msgpack.packb([entry])
    return len(packed).to_bytes(4, "little") + packed


def _flags(tensor: torch.Tensor) -> int:
    return kinds.REQUIRES_GRAD if tensor.requires_grad else 0


def _tensor_of(
    form: Form, buffer: memoryview, shared: SharedStorages | None
) -> torch.Tensor | None:
    """Return a tensor over a buffer, or None: `decoding` says why not."""
    if buffer.nbytes != form.nbytes or buffer.readonly:
        return None
    if form.place is not None:
        return _read_shared(form, form.place, bytes(buffer), shared)
    array = np.ndarray(form.shape, form.dtype, buffer, 0, form.strides)
    tensor = torch.from_numpy(array)
    return None if tensor.data_ptr() % form.dtype.itemsize else tensor


def _finished(tensor: torch.Tensor, on_gradient: OnGradient | None) -> torch.Tensor:
    """Let a tensor require a gradient, as it did at the sender."""
    return tensor.requires_grad_() if on_gradient is None else on_gradient(tensor)


def _read_around(tree: bytes, tensor: torch.Tensor) -> Any:
    """Return the value around a tensor, or `UNREAD`."""

    def lift(code: int, packed: bytes) -> torch.Tensor:
        if code != kinds.REFERENCE or any(packed):
            raise _NotFlat
        return tensor

    return _unpack(tree, lift)


def _read_shared(
    form: Form, place: SharedLocation, key: bytes, shared: SharedStorages | None
) -> torch.Tensor | None:
    if shared is None:
        return None
    try:
        storage = shared.find(key)
    except DecodeError:
        return None
    if place.stop > storage.nbytes():
        return None
    tensor = torch.empty(0, dtype=place.dtype, device=storage.device)
    return tensor.set_(storage, place.offset, form.shape, place.strides)


def _is_flat(part: Any, seen: list[int] | None) -> bool:
    """Return whether this is a scalar, or lists and dictionaries of scalars only.

    The ids of those are added to `seen`; None: they do not matter, nor does length.
    """
    kind = type(part)
    if kind in _SCALARS:
        return True
    if kind is list:
        if seen is not None and is_bulk(part):
            return False
        inside = part
    elif kind is dict and _are_scalars(map(type, part)):
        inside = part.values()
    else:
        return False
    if seen is not None:
        seen.append(id(part))
    return _are_scalars(map(type, inside)) or _are_flat(inside, _FLAT_DEPTH, seen)


def _are_flat(parts: Collection[Any], depth: int, seen: list[int] | None) -> bool:
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
        if seen is not None:
            seen.append(id(part))
        if _are_scalars(map(type, inside)):
            continue
        if not _are_flat(inside, depth - 1, seen):
            return False
    return True


def _repeats(seen: list[int]) -> bool:
    """Return whether a container occurs twice: a pickle keeps that it is one."""
    if len(seen) <= 2:  # noqa: PLR2004 - nearly always; a set takes longer
        return seen[0] == seen[-1] and len(seen) > 1
    return len(set(seen)) < len(seen)


def is_bulk(value: Any) -> bool:
    """Return whether a list or dictionary is better pickled, whatever else is in it."""
    return (
        len(value) > _BULK_LENGTH
        and type(value) is list
        and type(value[0]) not in _TEXT
    )


class _NotFlat(Exception):  # noqa: N818  (a signal, not an error)
    """A tree holds values that msgpack itself does not know."""


def _read_flat(control: bytes) -> Any:
    if control[:4] != kinds.FLAT:
        return UNREAD
    if control == _FLAT_NOTHING:
        return [[], {}]
    if control == _FLAT_NONE:
        return None
    return _unpack(memoryview(control)[4:], _not_flat)


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


def _not_flat(_code: int, _packed: bytes) -> Any:
    raise _NotFlat


def _form_of(packed: bytes) -> Form | None:
    """Return the form of a table with one plain tensor, else None; trusts nothing."""
    try:
        [[kind, flags, name, shape, buffer, *place]] = msgpack.unpackb(packed[4:])
    except Exception:  # noqa: BLE001  (`decoding` says what is wrong with it)
        return None
    is_exact = all(type(one) is int for one in (kind, flags, buffer))  # False == 0
    if not is_exact or kind not in _PLAIN_KINDS or flags not in _PLAIN_FLAGS or buffer:
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
        found = SharedLocation(DTYPES[name], offset, tuple(strides), stop)
        return form._replace(nbytes=KEY_BYTES, place=found)
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
