"""What `quick` writes, read: `decoding` in short, which reads all other messages.

Whatever bytes arrive, the result is what `decoding` makes of them, or `UNREAD`; then
nothing has been done.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import msgpack
import numpy as np
import torch

from asyncrpc.errors import DecodeError
from asyncrpc.serde import kinds
from asyncrpc.serde.quick import (
    ALONE,
    ARGUMENT,
    ARGUMENTS,
    DIMENSIONS_MAX,
    FLAT_NONE,
    FLAT_NOTHING,
    REFERENCES,
    REMEMBERED_BYTES_MAX,
    REMEMBERED_MAX,
    TENSORS_MAX,
)
from asyncrpc.serde.shared import KEY_BYTES, SharedStorages
from asyncrpc.serde.spans import reach
from asyncrpc.serde.tensors import DTYPES, KNOWN_DTYPES, SIZE_MAX
from asyncrpc.torch_modes import (
    dispatch_count,
    function_count,
    has_defaults,
    is_inference,
)

UNREAD: Final = object()
_ITEM_BYTES_MAX: Final = 16  # complex128
_PLAIN_KINDS: Final = (kinds.ENTRY_TENSOR, kinds.ENTRY_SHARED)
_PLAIN_FLAGS: Final = (0, kinds.REQUIRES_GRAD)
_INDICES: Final = {bytes(one.data): at for at, one in enumerate(REFERENCES)}
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
    """Reads messages; its caches are bounded and only save time."""

    __slots__ = ("_forms", "_tensors_max", "_wholes")

    def __init__(self, *, objects_max: int = TENSORS_MAX) -> None:
        """Begin with empty caches.

        Args:
            objects_max: tensors in one message.
        """
        self._tensors_max = min(objects_max, TENSORS_MAX)
        self._forms: dict[bytes, Sequence[Form]] = {}  # by the table
        # By the whole control part, where the tree is a common one.
        self._wholes: dict[bytes, tuple[Sequence[Form], bytes]] = {}

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
        forms, tree = self._wholes.get(control) or self._split(control)
        if len(forms) != len(buffers) or (
            not has_defaults()
            if on_gradient is not None
            else function_count() or dispatch_count() or is_inference()
        ):  # modes of torch that would see the tensors, or change them
            return UNREAD
        if tree is ARGUMENT or tree is ALONE:
            form = forms[0]
            tensor = _tensor_of(form, buffers[0], shared)
            if tensor is None:
                return UNREAD
            if form.requires_grad:
                tensor = _finished(tensor, on_gradient)
            return tensor if tree is ALONE else [[tensor], {}]
        value = _read_several(forms, buffers, tree, shared, on_gradient)
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
    form: Form, buffer: memoryview, shared: SharedStorages | None
) -> torch.Tensor | None:
    """Return a tensor over a buffer, or None: `decoding` says why not."""
    dtype, shape, nbytes, _, strides, place = form
    if buffer.nbytes != nbytes or buffer.readonly:
        return None
    if place is not None:
        return _read_shared(form, place, bytes(buffer), shared)
    tensor = _from_numpy(_array(shape, dtype, buffer, 0, strides))
    return None if tensor.data_ptr() % dtype.itemsize else tensor


def _finished(tensor: torch.Tensor, on_gradient: OnGradient | None) -> torch.Tensor:
    """Let a tensor require a gradient, as it did at the sender."""
    return tensor.requires_grad_() if on_gradient is None else on_gradient(tensor)


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


def _read_several(
    forms: Sequence[Form],
    buffers: Sequence[memoryview],
    tree: bytes,
    shared: SharedStorages | None,
    on_gradient: OnGradient | None,
) -> Any:
    """Return the value around some tensors, or `UNREAD`."""
    tensors: list[torch.Tensor] = []
    gradients: list[int] = []
    for form in forms:
        at = len(tensors)
        tensor = _tensor_of(form, buffers[at], shared)
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
    is_exact = all(type(one) is int for one in (kind, flags, buffer))  # False == 0
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
