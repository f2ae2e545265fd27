"""One message on its way out: a value becomes a tree, a table and buffers.

msgpack's C packer walks lists, dictionaries, strings and numbers by itself, and asks
`Encoder.lower` about every other value; so a list of a million floats costs no Python.
`lower` answers with an ExtType: a plain value, or a reference to an entry of the table.

Where the peer takes pickles, a value goes as one whole pickle instead if a part of it
needs one, if it has many parts that msgpack does not know (each takes 2 to 8 us, in a
pickle 0.1 us), or if a container occurs in it twice: a pickle keeps what is the same.
"""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import msgpack
import numpy as np
import torch

from asyncrpc.core.serde import kinds, layouts, pickling
from asyncrpc.core.serde.arrays import write_array
from asyncrpc.core.serde.by_value import NO_CODE, CodeName, CodeTable
from asyncrpc.core.serde.dismantling import dismantle
from asyncrpc.core.serde.encoded import OutgoingBuffers, Stager, key_of
from asyncrpc.core.serde.functions import NAMED_TYPES, FunctionTable, is_bound
from asyncrpc.core.serde.hooks import Hooks
from asyncrpc.core.serde.naming import find_method
from asyncrpc.core.serde.plain import RECIPES, Recipe, is_plain
from asyncrpc.core.serde.policy import Limits
from asyncrpc.core.serde.quick import INLINE_BYTES_MAX, REFERENCES, is_bulk
from asyncrpc.core.serde.reducing import FUTURES, Outside, Reducers, future_text
from asyncrpc.core.serde.shared import can_share
from asyncrpc.core.serde.small_tensors import ENTRIES_MAX, is_small
from asyncrpc.core.serde.tensors import TensorWriter, shared_entry
from asyncrpc.core.serde.unsendable import TooDeep, Unsendable
from asyncrpc.errors import AsyncRpcError, EncodeError

# Values that are lowered before the whole value is pickled instead.
_LOWERED_MAX: Final = 32
# Elements of a list of containers, likewise: to look into each takes 0.4 us.
_CONTAINERS_MAX: Final = 256
# Types that the packer would pack by itself, but must not, or that may contain those.
_SPILLED: Final = frozenset({bytes, bytearray, memoryview, list, dict})
_MUTABLE: Final = frozenset({bytearray, list, dict})
_NOTHING: Final[Any] = ()


class _Pickled(Exception):  # noqa: N818  (a signal, not an error)
    """The value is better sent as one pickle."""


class Encoder:
    """Encodes one message; used once, in one thread.

    Attributes:
        aliases: the tensor of the value for which a plain one is sent, by its id.
        code: functions and classes in it that travel by value.
        detached: tensors that require a gradient, which cannot follow them.
        gathers: whether many small tensors may travel as rows of a few.
        gradient_tensors: tensors that the reader will report, in that order.
        table: the entries.
        parameters: ids of those that require a gradient and belong to a module.
        objects: what each entry stands for.
        shared: storages that travel by reference, each with the buffer of its key.
    """

    __slots__ = (
        "_containers",
        "_depth",
        "_functions",
        "_hooks",
        "_limits",
        "_lowered_left",
        "_memo",
        "_pickles",
        "_tensors",
        "aliases",
        "code",
        "detached",
        "gathers",
        "gradient_tensors",
        "objects",
        "outbox",
        "parameters",
        "shared",
        "table",
    )

    def __init__(
        self,
        functions: FunctionTable,
        hooks: Hooks | None,
        limits: Limits,
        stager: Stager,
        *,
        pickles: bool,
    ) -> None:
        self.outbox = OutgoingBuffers()
        self.gradient_tensors: list[torch.Tensor] = []
        # Of a pickle alone: made there.
        self.detached: list[torch.Tensor] = _NOTHING
        self.aliases: dict[int, torch.Tensor] = _NOTHING
        self.parameters: set[int] = _NOTHING
        self.code: Sequence[CodeName] = _NOTHING
        self._pickles = pickles
        self.gathers = False
        self._lowered_left = _LOWERED_MAX if pickles else -1
        self._containers: set[int] = set()
        self._functions = functions
        self._hooks = hooks
        self._limits = limits
        self._tensors = TensorWriter(self.outbox, stager)
        self.table: list[Any] = []
        # Entries by identity; the objects are kept, so that no id is used twice.
        self._memo: dict[int, int] = {}
        self.objects: list[Any] = []
        self.shared: dict[bytes, tuple[torch.UntypedStorage, int]] = {}
        self._depth = 0

    def encode(self, value: Any, *, is_call: bool) -> bytes:
        """Return the control part of `value`."""
        if not (self._pickles and self._is_object(value)):
            try:
                if type(value) is tuple:
                    return self._message(self.pack(list(value)), kinds.ROOT_IS_TUPLE)
                self._note_container(value)
                return self._message(self.pack(value), 0)
            except (_Pickled, TooDeep):
                if not self._pickles:
                    raise
        if is_call:
            value = self._without_long_bytes(value)
        return self._message(msgpack.packb(self._pickle_whole(value)), 0)

    def _without_long_bytes(self, value: Any) -> Any:
        """Give long byte strings among arguments buffers: a pickle would copy them."""
        args, kwargs = value
        if type(args) is list and bytes in map(type, args):
            args = [self._outside(part) for part in args]
        return type(value)((args, kwargs))

    def _outside(self, part: Any) -> Any:
        if type(part) is not bytes or len(part) <= INLINE_BYTES_MAX:
            return part
        return Outside(self._index_of_bytes(part))

    def _message(self, tree: bytes, flags: int) -> bytes:
        if not self.table:
            return flags.to_bytes(4, "little") + tree
        if self.parameters:
            self._make_leaves()
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

    def _make_leaves(self) -> None:
        """Let the parameters of modules arrive as leaves of their own."""
        followed, leaves = [], set()
        for tensor in self.gradient_tensors:
            if id(self.aliases.get(id(tensor), tensor)) in self.parameters:
                leaves.add(self._memo[id(tensor)])
            else:
                followed.append(tensor)
        for index in leaves:
            if self.table[index] is not None:
                self.table[index][1] |= kinds.LEAF
        self._tensors.add_flags(leaves, kinds.LEAF)
        self.gradient_tensors = followed

    # --- choosing how a value is sent ------------------------------------------------

    def _handler_of(self, value: Any) -> Handler:
        if self.is_hooked(type(value)):
            return Encoder._external  # a plain function: `lower` passes self
        # By its type: `__class__` may differ from what its memory is.
        kind = type(value)
        if issubclass(kind, _BASES):  # most are of none: one look is all they take
            for base, handler in _BY_BASE:
                if issubclass(kind, base):
                    return handler
        return Encoder._pickle

    def _is_object(self, value: Any) -> bool:
        """Return whether only a pickle can hold a value, as is known at once."""
        kind = type(value)
        return (
            kind not in _PACKED
            and kind not in _HANDLERS
            and self._handler_of(value) is Encoder._pickle
        )

    def is_hooked(self, kind: type) -> bool:
        """Return whether values of a class go through the hooks."""
        return self._hooks is not None and issubclass(kind, self._hooks.handled)

    def _note_container(self, value: Any) -> None:
        """Note a mutable container; one that occurs twice must stay one."""
        if self._pickles:
            if id(value) in self._containers:
                raise _Pickled
            self._containers.add(id(value))

    def _note_containers(self, parts: Iterable[Any]) -> None:
        for part in parts:
            if type(part) in _MUTABLE:
                self._note_container(part)

    def _count_lowered(self) -> None:
        self._lowered_left -= 1
        if not self._lowered_left:
            raise _Pickled

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
        is_long = self._pickles and len(parts) > _CONTAINERS_MAX
        if is_long and is_bulk(value):
            raise _Pickled
        if _SPILLED.isdisjoint(map(type, parts)):
            return value
        if is_long:
            raise _Pickled
        if level + self._depth >= self._limits.depth_max:
            raise TooDeep
        level += 1
        if self._pickles:
            self._note_containers(parts)
        if kind is list:
            return [self._spill(part, level) for part in value]
        return {key: self._spill(part, level) for key, part in value.items()}

    def _spilled(self, value: Any) -> Any:
        if memoryview(value).nbytes > INLINE_BYTES_MAX:
            return self._bytes(value)
        return value if type(value) is bytes else self.lower(value)

    # --- the table -------------------------------------------------------------------

    def _append(self, value: Any, entry: list[Any] | None) -> int:
        """Give `value` an entry; None for a tensor, whose entry is written last."""
        index = len(self.table)
        if index >= self._limits.objects_max:
            raise Unsendable(
                value,
                f"one message holds at most {self._limits.objects_max} tensors,"
                " functions and other objects; send several, or stack the tensors",
            )
        self.table.append(entry)
        self._memo[id(value)] = index
        self.objects.append(value)
        return index

    def reserve(self, stand_in: Any) -> int:
        """Return the index of an entry for a tensor that `fill` will be given."""
        return self._append(stand_in, None)

    def fill(self, index: int, tensor: torch.Tensor) -> None:
        """Give a reserved entry its tensor."""
        self.objects[index] = tensor
        self._tensors.add(index, tensor, 0)

    def knows(self, value: Any) -> bool:
        """Return whether an object has an entry."""
        return id(value) in self._memo

    def uses_memory_at(self, addresses: set[int]) -> bool:
        """Return whether a tensor with an entry lies in one of these storages."""
        return self._tensors.uses_memory_at(addresses)

    def note_module(self, module: torch.nn.Module) -> None:
        """Note the parameters of a module: they arrive as leaves of their own."""
        for parameter in (vars(module).get("_parameters") or {}).values():
            if parameter is not None and parameter.requires_grad:
                self.parameters.add(id(parameter))

    # --- plain values and containers -------------------------------------------------

    def _sequence(self, value: Any, code: int) -> msgpack.ExtType:
        self._count_lowered()
        if code == kinds.SET:
            self._note_container(value)
        return msgpack.ExtType(code, self.pack(list(value)))

    def _tuple(self, value: tuple[Any, ...]) -> msgpack.ExtType:
        return self._sequence(value, kinds.TUPLE)

    def _plain(self, value: Any, recipe: Recipe) -> msgpack.ExtType:
        self._count_lowered()
        tree = recipe.to_tree(value) if is_plain(value) else None
        if tree is None and recipe.code not in kinds.EMPTY:
            return self._pickle(value)
        return msgpack.ExtType(recipe.code, self.pack(tree))

    def _bytes(self, value: Any) -> msgpack.ExtType:
        return _reference(self._index_of_bytes(value))

    def _index_of_bytes(self, value: Any) -> int:
        """Give a long byte string a buffer."""
        index = self._memo.get(id(value))
        if index is not None:
            return index
        view = memoryview(value)
        flat = view.cast("B") if view.c_contiguous else memoryview(bytes(view))
        kind = type(value) is bytearray
        code = kinds.ENTRY_BYTEARRAY if kind else kinds.ENTRY_BYTES
        return self._append(value, [code, self.outbox.add(flat)])

    def _bytearray(self, value: bytearray) -> msgpack.ExtType:
        if len(value) > INLINE_BYTES_MAX:
            return self._bytes(value)
        return msgpack.ExtType(kinds.BYTEARRAY, self.pack(bytes(value)))

    def _memoryview(self, value: memoryview) -> msgpack.ExtType:
        """Send a copy: a view arrives as bytes."""
        return self._bytes(value.tobytes())

    # --- tensors and arrays ----------------------------------------------------------

    def _tensor(self, value: torch.Tensor) -> msgpack.ExtType:
        if self._pickles and (
            value.__dict__  # which a pickle keeps
            or (self.gathers and len(self.table) >= ENTRIES_MAX and is_small(value))
        ):
            raise _Pickled
        index = self.index_of_tensor(value)
        return self._pickle(value) if index is None else _reference(index)

    def index_of_tensor(self, value: torch.Tensor) -> int | None:
        """Return the entry of a tensor; None if it is one that torch pickles."""
        index = self._memo.get(id(value))
        if index is not None:
            return index
        return self._add_tensor(value) if layouts.has_entry(value) else None

    def _add_tensor(self, value: torch.Tensor) -> int:
        flags = kinds.REQUIRES_GRAD if value.requires_grad else 0
        if type(value) is torch.nn.Parameter:
            flags |= kinds.PARAMETER
        if value.dim() > self._limits.dimensions_max:
            raise Unsendable(value, f"a tensor has {value.dim()} dimensions, too many")
        if layouts.is_strided(value):
            entry = None
            if value.is_cpu or can_share(value.device):
                entry = self._shared_entry(value, flags)
            index = self._append(value, entry)
            if entry is None:
                self._tensors.add(index, value, flags)
        else:
            entry = layouts.take_apart(value, flags, self._add_part)
            index = self._append(value, entry)
        if flags & kinds.REQUIRES_GRAD:
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
        index = self.index_of_array(value)
        return self._pickle(value) if index is None else _reference(index)

    def index_of_array(self, value: np.ndarray[Any, Any]) -> int | None:
        """Return the entry of an array; None if it can only be pickled."""
        index = self._memo.get(id(value))
        if index is not None:
            return index
        entry = write_array(value, self.outbox)
        return None if entry is None else self._append(value, entry)

    # --- values with a name ----------------------------------------------------------

    def _function(self, value: Any) -> msgpack.ExtType:
        if is_bound(value):
            return self._method(value)
        return _reference(self.index_of_function(value))

    def index_of_function(self, value: Any) -> int:
        """Return the entry of a function or class."""
        index = self._memo.get(id(value))
        if index is not None:
            return index
        try:
            name = self._functions.name_of(value)
        except EncodeError as error:
            raise Unsendable(value, error.problem) from error
        self._note_code(value, name)
        return self._append(value, [kinds.ENTRY_FUNCTION, name])

    def _note_code(self, value: Any, name: str) -> None:
        if type(name) is not CodeName:
            return
        if not self._pickles:
            raise Unsendable(value, f"{name.simple} {NO_CODE}")
        self.code = [*self.code, name]

    @property
    def code_table(self) -> CodeTable | None:
        """The code that travels by value; None: none may."""
        return self._functions.code

    def _method(self, value: Any) -> msgpack.ExtType:
        if self._pickles:
            raise _Pickled  # the instance may occur elsewhere
        name = find_method(value)
        if name is None:
            raise Unsendable(value, _lost_method(value))
        entry = [kinds.ENTRY_METHOD, self.pack(value.__self__), name]
        return _reference(self._append(value, entry))

    def _partial(self, value: functools.partial[Any]) -> msgpack.ExtType:
        if self._pickles:
            raise _Pickled
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
        self._note_code(kind, name)
        return _reference(self._append(value, [kinds.ENTRY_ENUM, name, value.name]))

    def _exception(self, value: BaseException) -> msgpack.ExtType:
        if self._pickles:
            raise _Pickled
        known = self._memo.get(id(value))
        if known is not None:
            return _reference(known)
        try:
            name = self._functions.name_of(type(value))
        except EncodeError:  # a class made at run time pickles itself, or cannot travel
            return self._pickle(value)
        parts = self.pack(dismantle(value))
        return _reference(self._append(value, [kinds.ENTRY_EXCEPTION, name, parts]))

    # --- the rest --------------------------------------------------------------------

    def _external(self, value: Any) -> msgpack.ExtType:
        return _reference(self.index_of_external(value))

    def index_of_external(self, value: Any) -> int:
        """Return the entry of a value that the hooks handle."""
        index = self._memo.get(id(value))
        if index is not None:
            return index
        assert self._hooks is not None  # they handle the type
        try:
            lowered = self._hooks.lower(value)
        except AsyncRpcError as error:
            raise Unsendable(value, str(error)) from error
        return self._append(value, [kinds.ENTRY_EXTERNAL, lowered])

    def _future(self, value: Any) -> msgpack.ExtType:
        raise Unsendable(value, future_text(value))

    def _pickle(self, value: Any) -> msgpack.ExtType:
        """Answer about a part that only a pickle can hold."""
        if self._pickles:
            raise _Pickled
        kind = type(value)
        raise Unsendable(
            value,
            f"a {kind.__module__}.{kind.__qualname__} travels only as a pickle,"
            " which policy strict, here or at the peer, forbids; send tensors and plain"
            " containers, or use Policy.TRUSTED between authenticated workers",
        )

    def _pickle_whole(self, value: Any) -> msgpack.ExtType:
        self.detached, self.aliases, self.parameters = [], {}, set()
        reducers = Reducers(self)
        try:
            data, buffers = pickling.dump(value, self.outbox, reducers)
            if not reducers.finish():
                data, buffers = pickling.dump(value, self.outbox, reducers)
        finally:
            reducers.clear()  # its methods are in it: a cycle, which holds the value
        content: bytes | int = data
        if len(data) > INLINE_BYTES_MAX:
            content = self.outbox.add(memoryview(data))
        entry = [kinds.ENTRY_PICKLE, content, buffers]
        return _reference(self._append(value, entry))


Handler = Callable[[Encoder, Any], msgpack.ExtType]


def _reference(index: int) -> msgpack.ExtType:
    if index < len(REFERENCES):
        return REFERENCES[index]
    return msgpack.ExtType(kinds.REFERENCE, index.to_bytes(4, "little"))


def _lost_method(method: Any) -> str:
    kind, name = type(method.__self__), method.__func__.__qualname__
    return (
        f"{name} is bound to a {kind.__qualname__}, but no attribute of that leads to"
        " it; send the function itself, with the object as its first argument"
    )


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
# What the packer knows by itself.
_PACKED: Final = frozenset((list, dict, str, bytes, int, float, bool, type(None)))
# For a type that is not listed its base classes decide, in this order.
_BY_BASE: Final[tuple[tuple[Any, Handler], ...]] = (
    (FUTURES, Encoder._future),  # noqa: SLF001
    (NAMED_TYPES, Encoder._function),  # noqa: SLF001
    ((types.MethodWrapperType, np.ufunc), Encoder._function),  # noqa: SLF001
    (enum.Enum, Encoder._enum),  # noqa: SLF001
    (BaseException, Encoder._exception),  # noqa: SLF001
    (np.generic, _plainly(RECIPES[np.generic])),
    (np.dtype, _plainly(RECIPES[np.dtype])),
)
_BASES: Final = tuple(kind for kind, _ in _BY_BASE)
