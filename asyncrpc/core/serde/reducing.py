"""How objects inside a pickle are taken apart: by entries of the message, or by pickle.

The pickler asks `Reducers` once for each class, in C for each object; values of
Python's own containers, numbers and text it does not ask about.  A tensor, a reference
or a function becomes a call of `reference(index)`, which the unpickler knows.  (A
`persistent_id` would be asked about every integer, at 60 ns each.)
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import copyreg
import io
import operator
import pickle
import types
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from asyncrpc.core.serde import layouts
from asyncrpc.core.serde.dismantling import assemble, dismantle
from asyncrpc.core.serde.encoded import key_of
from asyncrpc.core.serde.functions import NAMED_TYPES, is_bound
from asyncrpc.core.serde.naming import find_method
from asyncrpc.core.serde.small_tensors import SmallTensors
from asyncrpc.core.serde.unsendable import Unsendable
from asyncrpc.errors import DecodeError

if TYPE_CHECKING:
    from asyncrpc.core.serde.encoding import Encoder

_NONE: Final[set[str]] = set()
Reduced = str | tuple[Any, ...]
Reducer = Callable[[Any], Reduced]

_JAGGED: Final = torch.nested._internal.nested_tensor.NestedTensor  # noqa: SLF001
_rebuild_subclass: Final = torch._tensor._rebuild_from_type_v2  # noqa: SLF001
_by_protocol: Final[Reducer] = operator.methodcaller("__reduce_ex__", 5)
_TENSOR_REDUCERS: Final = frozenset(
    {torch.Tensor.__reduce_ex__, torch.nn.Parameter.__reduce_ex__}
)
_ERROR_REDUCERS: Final = tuple(
    error.__reduce__ for error in (BaseException, OSError, ImportError)
)
# What stands for a value that is not there yet.
FUTURES: Final = (
    asyncio.Future,
    concurrent.futures.Future,
    torch.futures.Future,
    types.CoroutineType,
)


def reference(index: int) -> object:
    """Stand in a pickle for entry `index` of its message; never called."""
    raise DecodeError(
        f"a pickle that refers to object {index} was read outside of its message"
    )


class Outside:
    """Stands in a value for an entry of the message."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index

    def __reduce__(self) -> Reduced:
        return reference, (self.index,)


class Reducers(dict[type, Reducer]):
    """The reducers of one pickle, by class: the pickler's `dispatch_table`."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self._encoder = encoder
        self._small_tensors: SmallTensors | None = None

    @property
    def small_tensors(self) -> SmallTensors:
        """The small tensors of this pickle: made for the first tensor."""
        if self._small_tensors is None:
            self._small_tensors = SmallTensors(self._encoder, Outside)
        return self._small_tensors

    def finish(self) -> bool:
        """Write the gathered tensors; return whether the pickle is right with them."""
        return self._small_tensors is None or self._small_tensors.finish()

    def __missing__(self, kind: type) -> Reducer:
        reducer = self[kind] = self._reducer_of(kind)
        return reducer

    def _reducer_of(self, kind: type) -> Reducer:
        if self._encoder.is_hooked(kind):
            return self._external
        if issubclass(kind, self._BASES):  # most are of none
            if kind in self._EXACT:
                return types.MethodType(self._EXACT[kind], self)
            for base, reducer in self._BY_BASE:
                if issubclass(kind, base):
                    return types.MethodType(reducer, self)
        return copyreg.dispatch_table.get(kind, _by_protocol)

    def _external(self, value: Any) -> Reduced:
        return reference, (self._encoder.index_of_external(value),)

    # --- tensors ---------------------------------------------------------------------

    def _tensor(self, value: torch.Tensor) -> Reduced:
        row = self.small_tensors.reduce(value)
        if row is not None:
            return row
        index = self._encoder.index_of_tensor(value)
        if index is None:
            return self._by_torch(value)
        state = value.__dict__
        if not state:
            return reference, (index,)
        return reference, (index,), state, None, None, set_attributes

    def _subclass(self, value: torch.Tensor) -> Reduced:
        """Take a tensor of a class of the program's own apart.

        One that only wraps elements of its own is sent as they are.  All others know
        better how to pickle themselves, but their gradient cannot follow.
        """
        kind = type(value)
        # What asyncrpc asks a tensor, it asks on the event loop.
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            if value.requires_grad and isinstance(value, _JAGGED):
                return self._jagged(value)
            is_alias = _is_alias(kind) and layouts.has_entry(value)
        if not is_alias:
            return self._by_torch(value)
        with _recording():
            plain = self._alias(value, value.as_subclass(torch.Tensor))
        state = torch._utils._get_obj_state(value)  # type: ignore[no-untyped-call]  # noqa: SLF001
        return _rebuild_subclass, (as_subclass, kind, (plain, kind), state)

    def _jagged(self, value: Any) -> Reduced:
        with _recording():
            values = self._alias(value, value.values())
        shape = value._offsets, value._lengths, value._ragged_idx  # noqa: SLF001
        return jagged_of, (values, *shape, value._metadata_cache)  # noqa: SLF001

    def _alias(self, value: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
        """Note that a plain tensor is sent in place of another."""
        self._encoder.aliases[id(plain)] = value
        self._encoder.index_of_tensor(plain)  # which keeps it
        return plain

    def _by_torch(self, value: torch.Tensor) -> Reduced:
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            if value.requires_grad:
                self._encoder.detached.append(value)
        return _by_protocol(value)

    def _module(self, value: torch.nn.Module) -> Reduced:
        self._encoder.note_module(value)
        return copyreg.dispatch_table.get(type(value), _by_protocol)(value)

    def _script(self, value: torch.jit.ScriptModule) -> Reduced:
        shared = {
            name: tensor.detach()
            for name, tensor in _state_of(value).items()
            if tensor.layout is torch.strided and key_of(tensor.untyped_storage())
        }
        return loaded, (_saved(value), shared) if shared else (_saved(value),)

    # --- other objects ---------------------------------------------------------------

    def _array(self, value: np.ndarray[Any, Any]) -> Reduced:
        index = self._encoder.index_of_array(value)
        return _by_protocol(value) if index is None else (reference, (index,))

    def _memoryview(self, value: memoryview) -> Reduced:
        """Send a copy: a view arrives as bytes."""
        return bytes, (pickle.PickleBuffer(value.tobytes()),)

    def reduce_function(self, value: Any) -> Reduced:
        """Take a function, a method, or what else has a name apart."""
        if is_bound(value):
            return self._method(value)
        return reference, (self._encoder.index_of_function(value),)

    def reduce_class(self, value: type) -> Any:
        """Take a class that travels by value apart; other classes go by name."""
        table = self._encoder.code_table
        if table is None or not table.takes(value):
            return NotImplemented
        return reference, (self._encoder.index_of_function(value),)

    @property
    def lone_modules(self) -> set[str]:
        """Names of modules whose classes travel by value; empty: as far as is known."""
        table = self._encoder.code_table
        return table.modules if table is not None and table.main_travels else _NONE

    def _method(self, value: Any) -> Reduced:
        name = find_method(value)
        if name is not None:
            return getattr, (value.__self__, name)
        return bind, (value.__func__, value.__self__)

    def _exception(self, value: BaseException) -> Reduced:
        kind = type(value)
        if kind.__reduce__ not in _ERROR_REDUCERS:
            return _by_protocol(value)
        args, state, slots = dismantle(value)
        return assemble, (kind, [args, {}, slots]), state or None

    def _future(self, value: Any) -> Reduced:
        raise Unsendable(value, future_text(value))

    def _class(self, value: type) -> Reduced:
        return value.__qualname__

    _BY_BASE: Final[tuple[tuple[Any, Callable[..., Reduced]], ...]] = (
        (torch.Tensor, _subclass),
        (torch.jit.ScriptModule, _script),
        (torch.nn.Module, _module),
        (type, _class),
        (BaseException, _exception),
        (memoryview, _memoryview),
        (FUTURES, _future),
        (NAMED_TYPES, reduce_function),
        ((types.MethodWrapperType, np.ufunc), reduce_function),
    )
    # Other classes derived from arrays pickle themselves; one over a file cannot.
    _EXACT: Final[dict[type, Callable[..., Reduced]]] = {
        torch.Tensor: _tensor,
        torch.nn.Parameter: _tensor,
        np.ndarray: _array,
        np.memmap: _array,
    }
    _BASES: Final = (np.ndarray, *[base for base, _ in _BY_BASE])


def future_text(value: object) -> str:
    """Return why a future cannot be sent."""
    text = "it is not the value that it will have; await it, and send the result"
    if isinstance(value, torch.futures.Future):
        return f"Can not pickle torch.futures.Future: {text}"  # torch's words
    return f"a {type(value).__qualname__} cannot: {text}"


def _is_alias(kind: type[torch.Tensor]) -> bool:
    """Return whether tensors of a class are plain ones under another name."""
    return (
        kind.__reduce_ex__ in _TENSOR_REDUCERS
        and kind.__reduce__ is torch.Tensor.__reduce__
        and kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    )


@contextlib.contextmanager
def _recording() -> Iterator[None]:
    """Let torch record what is done, and run none of the program's overrides."""
    with (
        torch._C.DisableTorchFunctionSubclass(),  # noqa: SLF001
        torch.inference_mode(mode=False),
        torch.enable_grad(),
    ):
        yield


# --- what pickles call ---------------------------------------------------------------


def set_attributes(value: Any, state: dict[str, Any]) -> None:
    """Give a tensor the attributes that it had at the sender."""
    value.__dict__.update(state)


def bind(function: Any, instance: Any) -> types.MethodType:
    """Return a bound method that no name of its instance leads to."""
    return types.MethodType(function, instance)


def as_subclass(plain: torch.Tensor, kind: type[torch.Tensor]) -> torch.Tensor:
    """Return a received tensor as one of its class, a leaf if it is one."""
    if plain.requires_grad and plain.is_leaf:
        return torch.Tensor._make_subclass(kind, plain.detach(), True)  # noqa: FBT003, SLF001
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
        return plain.as_subclass(kind)


def jagged_of(
    values: torch.Tensor,
    offsets: torch.Tensor,
    lengths: torch.Tensor | None,
    ragged_idx: int,
    cache: dict[str, Any],
) -> torch.Tensor:
    """Return a received jagged tensor that requires a gradient, a leaf if it is one."""
    if values.is_leaf:
        return _JAGGED(
            values.detach(),
            offsets,
            lengths=lengths,
            _ragged_idx=ragged_idx,
            _metadata_cache=cache,
            requires_grad=True,
        )
    whole = torch.nested.nested_tensor_from_jagged(
        values, offsets, lengths, jagged_dim=ragged_idx
    )
    whole._metadata_cache.update(cache)  # type: ignore[attr-defined]  # noqa: SLF001
    return whole


_NONE_SHARED: Final[Mapping[str, torch.Tensor]] = types.MappingProxyType({})


def loaded(saved: bytes, shared: Mapping[str, torch.Tensor] = _NONE_SHARED) -> Any:
    """Return a copy of the module that `_saved` was given.

    Args:
        shared: parameters and buffers whose memory it shares; the others are its own.
    """
    module: Any = torch.jit.load(io.BytesIO(saved))  # type: ignore[no-untyped-call]
    for name, tensor in _state_of(module).items() if shared else ():
        if name in shared:
            tensor.data = shared[name]
    return module


def _state_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _saved(module: torch.jit.ScriptModule) -> bytes:
    """Return a compiled module, its code and parameters, as torch saves it."""
    file = io.BytesIO()
    torch.jit.save(module, file)
    return file.getvalue()
