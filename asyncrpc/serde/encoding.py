"""One message on its way out: a value becomes a tree, a table and buffers.

msgpack's C packer walks lists, dictionaries, strings and numbers by itself, and asks
`Encoder.lower` about every other value; so a list of a million floats costs no Python.
`lower` answers with an ExtType: a plain value, or a reference to an entry of the table.
"""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Callable
from typing import Any, Final

import msgpack
import numpy as np
import torch

from asyncrpc.errors import AsyncRpcError, EncodeError
from asyncrpc.serde import kinds, layouts, pickling
from asyncrpc.serde.arrays import write_array
from asyncrpc.serde.copies import Stager
from asyncrpc.serde.dismantling import dismantle
from asyncrpc.serde.functions import NAMED_TYPES, FunctionTable, is_bound
from asyncrpc.serde.hooks import Hooks
from asyncrpc.serde.outgoing_buffers import OutgoingBuffers
from asyncrpc.serde.plain import RECIPES, Recipe, is_plain
from asyncrpc.serde.policy import Limits, Policy
from asyncrpc.serde.shared import can_share, key_of
from asyncrpc.serde.tensors import TensorWriter, shared_entry
from asyncrpc.serde.unsendable import TooDeep, Unsendable

# Longer byte strings get a buffer: they are sent without a copy, and received beside
# the control part, whose size is limited.
INLINE_BYTES_MAX: Final = 16 << 10

# ExtTypes for the first references, made once: a named tuple takes 0.4 us.
_REFERENCES: Final = tuple(
    msgpack.ExtType(kinds.REFERENCE, index.to_bytes(4, "little"))
    for index in range(256)
)
# Types that the packer would pack by itself, but must not, or that may contain those.
_SPILLED: Final = frozenset({bytes, bytearray, memoryview, list, dict})


class Encoder:
    """Encodes one message; used once, in one thread.

    Attributes:
        gradient_tensors: tensors that the reader will report, in that order.
        table: the entries.
        objects: what each entry stands for.
        shared: storages that travel by reference, each with the buffer of its key.
    """

    __slots__ = (
        "_depth",
        "_functions",
        "_hooks",
        "_limits",
        "_memo",
        "_tensors",
        "gradient_tensors",
        "objects",
        "outbox",
        "shared",
        "table",
    )

    def __init__(
        self,
        functions: FunctionTable,
        hooks: Hooks | None,
        limits: Limits,
        stager: Stager,
    ) -> None:
        self.outbox = OutgoingBuffers()
        self.gradient_tensors: list[torch.Tensor] = []
        self._functions = functions
        self._hooks = hooks
        self._limits = limits
        self._tensors = TensorWriter(self.outbox, stager)
        self.table: list[Any] = []
        # Entries by identity (-id for a parameter inside a pickle); the objects are
        # kept, so that no id is used twice.
        self._memo: dict[int, int] = {}
        self.objects: list[Any] = []
        self.shared: dict[bytes, tuple[torch.UntypedStorage, int]] = {}
        self._depth = 0

    def encode(self, value: Any, *, pickled: bool = False) -> bytes:
        """Return the control part of `value`; may be called again if it failed.

        Args:
            value: what to encode.
            pickled: send the root as one pickle, which keeps cycles.

        Raises:
            Unsendable: a part of the value cannot be sent.
            TooDeep: the value is nested too deep, or contains itself.
        """
        self._depth = 0
        if pickled:
            return self._message(self.pack(self._pickle(value)), 0)
        if type(value) is tuple:
            return self._message(self.pack(list(value)), kinds.ROOT_IS_TUPLE)
        return self._message(self.pack(value), 0)

    def _message(self, tree: bytes, flags: int) -> bytes:
        if not self.table:
            return flags.to_bytes(4, "little") + tree
        self._tensors.finish(self.table)
        if self.outbox.copies:
            flags |= kinds.STAGED
            if not self.outbox.buffers:  # empty tensors; only payloads are looked at
                self.outbox.add(memoryview(b"\0"))
        table: bytes = msgpack.Packer().pack(self.table)
        if len(table) > self._limits.control_bytes_max:
            return table  # over the limit whatever comes after it
        return (flags | len(table)).to_bytes(4, "little") + table + tree

    def pack(self, value: Any) -> bytes:
        """Return `value` as msgpack."""
        if self._depth >= self._limits.depth_max:
            raise TooDeep
        self._depth += 1
        packer = msgpack.Packer(
            default=self.lower, strict_types=True, unicode_errors="surrogatepass"
        )
        try:
            packed: bytes = packer.pack(self._spill(value))
        except ValueError as error:
            if "recursion limit" in str(error):
                raise TooDeep from error
            raise
        self._depth -= 1
        return packed

    def lower(self, value: Any) -> msgpack.ExtType:
        """Return the ExtType of a value that msgpack does not know."""
        handler = _HANDLERS.get(type(value))
        if handler is None:
            handler = self._handler_of(value)
        return handler(self, value)

    # --- choosing how a value is sent ------------------------------------------------

    def _handler_of(self, value: Any) -> Handler:
        if self._is_hooked(value):
            return Encoder._external  # a plain function: `lower` passes self
        # By its type: `__class__` may differ from what its memory is.
        for kind, handler in _BY_BASE:
            if issubclass(type(value), kind):
                return handler
        return Encoder._pickle

    def _is_hooked(self, value: Any) -> bool:
        hooks = self._hooks
        return hooks is not None and issubclass(type(value), hooks.handled)

    def _spill(self, value: Any, level: int = 0) -> Any:
        """Take byte strings out of lists and dictionaries.

        The packer would put them all inline: long ones, which need a buffer, and
        bytearrays, which would arrive as bytes.  A container without byte strings and
        containers is left to the packer: 12 ns an element.
        """
        kind = type(value)
        if kind is list:
            parts = value
        elif kind is dict:
            parts = value.values()
        else:
            return self._spilled(value) if kind in _SPILLED else value
        if _SPILLED.isdisjoint(map(type, parts)):
            return value
        if level + self._depth >= self._limits.depth_max:
            raise TooDeep
        level += 1
        if kind is list:
            return [self._spill(part, level) for part in value]
        return {key: self._spill(part, level) for key, part in value.items()}

    def _spilled(self, value: Any) -> Any:
        if memoryview(value).nbytes > INLINE_BYTES_MAX:
            return self._bytes(value)
        return value if type(value) is bytes else self.lower(value)

    # --- the table -------------------------------------------------------------------

    def _append(
        self, value: Any, entry: list[Any] | None, *, leaf: bool = False
    ) -> int:
        """Give `value` an entry; None for a tensor, whose entry is written last."""
        index = len(self.table)
        if index >= self._limits.objects_max:
            raise Unsendable(
                value,
                f"one message holds at most {self._limits.objects_max} tensors,"
                " functions and other objects; send several, or stack the tensors",
            )
        self.table.append(entry)
        self._memo[-id(value) if leaf else id(value)] = index
        self.objects.append(value)
        return index

    def _known(self, value: Any) -> msgpack.ExtType | None:
        index = self._memo.get(id(value))
        return None if index is None else _reference(index)

    def _refer(self, value: Any) -> int | None:
        """Give an object inside a pickle an entry, if its type has entries."""
        kind = type(value)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            if not _is_strided(value) and not _has_parts(value):
                return None  # torch pickles it
            leaf = kind is torch.nn.Parameter
            index = self._memo.get(-id(value) if leaf else id(value))
            return self._add_tensor(value, leaf=leaf) if index is None else index
        if self._is_hooked(value):
            index = self._memo.get(id(value))
            return self._add_external(value) if index is None else index
        return None

    # --- plain values and containers -------------------------------------------------

    def _sequence(self, value: Any, code: int) -> msgpack.ExtType:
        return msgpack.ExtType(code, self.pack(list(value)))

    def _tuple(self, value: tuple[Any, ...]) -> msgpack.ExtType:
        return self._sequence(value, kinds.TUPLE)

    def _plain(self, value: Any, recipe: Recipe) -> msgpack.ExtType:
        tree = recipe.to_tree(value) if is_plain(value) else None
        if tree is None and recipe.code not in kinds.EMPTY:
            return self._pickle(value)
        return msgpack.ExtType(recipe.code, self.pack(tree))

    def _bytes(self, value: Any) -> msgpack.ExtType:
        """Give a long byte string a buffer."""
        known = self._known(value)
        if known is not None:
            return known
        view = memoryview(value)
        flat = view.cast("B") if view.c_contiguous else memoryview(bytes(view))
        kind = type(value) is bytearray
        code = kinds.ENTRY_BYTEARRAY if kind else kinds.ENTRY_BYTES
        return _reference(self._append(value, [code, self.outbox.add(flat)]))

    def _bytearray(self, value: bytearray) -> msgpack.ExtType:
        if len(value) > INLINE_BYTES_MAX:
            return self._bytes(value)
        return msgpack.ExtType(kinds.BYTEARRAY, self.pack(bytes(value)))

    def _memoryview(self, value: memoryview) -> msgpack.ExtType:
        """Send a copy: a view arrives as bytes."""
        return self._bytes(value.tobytes())

    # --- tensors and arrays ----------------------------------------------------------

    def _tensor(self, value: torch.Tensor) -> msgpack.ExtType:
        index = self._memo.get(id(value))
        if index is None:
            if not _is_strided(value) and not _has_parts(value):
                return self._pickle(value)
            index = self._add_tensor(value, leaf=False)
        return _reference(index)

    def _add_tensor(self, value: torch.Tensor, *, leaf: bool) -> int:
        flags = kinds.REQUIRES_GRAD if value.requires_grad else 0
        if type(value) is torch.nn.Parameter:
            flags |= kinds.PARAMETER
        if leaf:
            flags |= kinds.LEAF
        if value.dim() > self._limits.dimensions_max:
            raise Unsendable(value, f"a tensor has {value.dim()} dimensions, too many")
        if _is_strided(value):
            entry = None
            if value.is_cpu or can_share(value.device):
                entry = self._shared_entry(value, flags)
            index = self._append(value, entry, leaf=leaf)
            if entry is None:
                self._tensors.add(index, value, flags)
        else:
            entry = layouts.take_apart(value, flags, self._add_part)
            index = self._append(value, entry, leaf=leaf)
        if flags & kinds.REQUIRES_GRAD and not leaf:
            self.gradient_tensors.append(value)
        return index

    def _shared_entry(self, value: torch.Tensor, flags: int) -> list[Any] | None:
        """Return the entry of a tensor sent by reference; None if sent by value."""
        storage = value.untyped_storage()
        key = key_of(storage)
        if key is None:
            return None
        if key not in self.shared:
            self.shared[key] = storage, self.outbox.add(memoryview(key))
        return shared_entry(value, flags, self.shared[key][1])

    def _add_part(self, part: torch.Tensor) -> int:
        index = self._append(part, None)
        self._tensors.add(index, part, 0)
        return index

    def _array(self, value: np.ndarray[Any, Any]) -> msgpack.ExtType:
        known = self._known(value)
        if known is not None:
            return known
        entry = write_array(value, self.outbox)
        if entry is None:
            return self._pickle(value)
        return _reference(self._append(value, entry))

    # --- values with a name ----------------------------------------------------------

    def _function(self, value: Any) -> msgpack.ExtType:
        if is_bound(value):
            return self._method(value)
        known = self._known(value)
        if known is not None:
            return known
        try:
            name = self._functions.name_of(value)
        except EncodeError as error:
            raise Unsendable(value, error.problem) from error
        return _reference(self._append(value, [kinds.ENTRY_FUNCTION, name]))

    def _method(self, value: Any) -> msgpack.ExtType:
        instance = self.pack(value.__self__)
        entry = [kinds.ENTRY_METHOD, instance, value.__name__]
        return _reference(self._append(value, entry))

    def _partial(self, value: functools.partial[Any]) -> msgpack.ExtType:
        parts = self.pack([value.func, list(value.args), value.keywords])
        return _reference(self._append(value, [kinds.ENTRY_PARTIAL, parts]))

    def _enum(self, value: enum.Enum) -> msgpack.ExtType:
        kind = type(value)
        if kind.__members__.get(value.name) is not value:  # a combination of flags
            return self._pickle(value)
        try:
            name = self._functions.name_of(kind)
        except EncodeError as error:
            raise Unsendable(value, error.problem) from error
        return _reference(self._append(value, [kinds.ENTRY_ENUM, name, value.name]))

    def _exception(self, value: BaseException) -> msgpack.ExtType:
        known = self._known(value)
        if known is not None:
            return known
        try:
            name = self._functions.name_of(type(value))
        except EncodeError:  # a class made at run time pickles itself, or cannot travel
            return self._pickle(value)
        parts = self.pack(dismantle(value))
        return _reference(self._append(value, [kinds.ENTRY_EXCEPTION, name, parts]))

    # --- the rest --------------------------------------------------------------------

    def _external(self, value: Any) -> msgpack.ExtType:
        known = self._known(value)
        return known if known is not None else _reference(self._add_external(value))

    def _add_external(self, value: Any) -> int:
        assert self._hooks is not None  # they handle the type
        try:
            lowered = self._hooks.lower(value)
        except AsyncRpcError as error:
            raise Unsendable(value, str(error)) from error
        return self._append(value, [kinds.ENTRY_EXTERNAL, lowered])

    def _pickle(self, value: Any) -> msgpack.ExtType:
        known = self._known(value)
        if known is not None:
            return known
        kind = type(value)
        if self._functions.policy is not Policy.TRUSTED:
            raise Unsendable(
                value,
                f"a {kind.__module__}.{kind.__qualname__} travels only as a pickle,"
                " which this worker's policy, strict, forbids; send tensors and plain"
                " containers, or use Policy.TRUSTED between authenticated workers",
            )
        data, buffers = pickling.dump(value, self.outbox, self._refer)
        content: bytes | int = data
        if len(data) > INLINE_BYTES_MAX:
            content = self.outbox.add(memoryview(data))
        entry = [kinds.ENTRY_PICKLE, content, buffers]
        return _reference(self._append(value, entry))


Handler = Callable[[Encoder, Any], msgpack.ExtType]


def _reference(index: int) -> msgpack.ExtType:
    if index < len(_REFERENCES):
        return _REFERENCES[index]
    return msgpack.ExtType(kinds.REFERENCE, index.to_bytes(4, "little"))


def _is_strided(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is one block of elements, as nearly all are."""
    return (
        tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
    )


def _has_parts(tensor: torch.Tensor) -> bool:
    """Return whether a tensor that is not strided is sent as its parts, else pickled.

    Raises:
        Unsendable: its layout is unknown and it is on a device: to pickle it would make
            the event loop wait for the device.
    """
    if layouts.is_known(tensor):
        return True
    if not tensor.is_cpu:
        raise Unsendable(tensor, layouts.refusal(tensor))
    return False


def _plainly(recipe: Recipe) -> Handler:
    return lambda encoder, value: encoder._plain(value, recipe)  # noqa: SLF001


def _in_sequence(code: int) -> Handler:
    return lambda encoder, value: encoder._sequence(value, code)  # noqa: SLF001


_HANDLERS: Final[dict[type, Handler]] = {
    **{kind: _plainly(recipe) for kind, recipe in RECIPES.items()},
    tuple: Encoder._tuple,  # noqa: SLF001
    set: _in_sequence(kinds.SET),
    frozenset: _in_sequence(kinds.FROZENSET),
    bytearray: Encoder._bytearray,  # noqa: SLF001
    memoryview: Encoder._memoryview,  # noqa: SLF001
    torch.Tensor: Encoder._tensor,  # noqa: SLF001
    torch.nn.Parameter: Encoder._tensor,  # noqa: SLF001
    np.ndarray: Encoder._array,  # noqa: SLF001
    functools.partial: Encoder._partial,  # noqa: SLF001
}
# For a type that is not listed its base classes decide, in this order.
_BY_BASE: Final[tuple[tuple[Any, Handler], ...]] = (
    (NAMED_TYPES, Encoder._function),  # noqa: SLF001
    ((types.MethodWrapperType, np.ufunc), Encoder._function),  # noqa: SLF001
    (enum.Enum, Encoder._enum),  # noqa: SLF001
    (BaseException, Encoder._exception),  # noqa: SLF001
    (np.generic, _plainly(RECIPES[np.generic])),
    (np.dtype, _plainly(RECIPES[np.dtype])),
)
