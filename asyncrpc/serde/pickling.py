"""Pickle, protocol 5, for values without a better form; policy TRUSTED only.

Tensors and references inside a pickled object are not pickled: they get an entry in the
table like any other, and the pickle refers to it: they reduce to a call of
`reference(index)`, which the unpickler knows.  (A `persistent_id` would be
asked about every integer in the object, at 60 ns each.)  Large buffers of objects that
support it, as numpy arrays do, travel out of band.

Unpickling runs the sender's code by design.  All its failures become `DecodeError`.
"""

from __future__ import annotations

import io
import pickle
import types
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch

from asyncrpc.errors import DecodeError
from asyncrpc.serde.exceptions import words_of
from asyncrpc.serde.naming import resolve_global
from asyncrpc.serde.outgoing_buffers import OutgoingBuffers
from asyncrpc.serde.unsendable import Unsendable

# Shorter buffers are cheaper inside the pickle than as a buffer of the message.
IN_BAND_BYTES_MAX: Final = 16 << 10

Refer = Callable[[Any], int | None]  # the index of an object's entry, if it has one


def reference(index: int) -> object:
    """Stand in a pickle for entry `index` of its message; never called."""
    raise DecodeError(
        f"a pickle that refers to object {index} was read outside of its message"
    )


class _Pickler(pickle.Pickler):
    def __init__(
        self, file: io.BytesIO, refer: Refer, keep: Callable[[pickle.PickleBuffer], Any]
    ) -> None:
        super().__init__(file, protocol=5, buffer_callback=keep)
        self._refer = refer

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.FunctionType) and "<" in obj.__qualname__:
            raise Unsendable(
                obj,
                f"{obj.__qualname__} cannot be sent: a lambda or a nested function has"
                " no name that leads to it; make it a function at module level",
            )
        if isinstance(obj, torch.jit.ScriptModule):
            return _loaded, (_saved(obj),)
        index = self._refer(obj)
        return NotImplemented if index is None else (reference, (index,))


def _saved(module: torch.jit.ScriptModule) -> bytes:
    """Return a compiled module, its code and parameters, as torch saves it."""
    file = io.BytesIO()
    torch.jit.save(module, file)
    return file.getvalue()


def _loaded(saved: bytes) -> Any:
    """Return a copy of the module that `_saved` was given, with its own parameters."""
    return torch.jit.load(io.BytesIO(saved))  # type: ignore[no-untyped-call]


class _Unpickler(pickle.Unpickler):  # noqa: S301 - policy TRUSTED only
    def __init__(
        self, data: Any, buffers: Sequence[memoryview], get: Callable[[int], Any]
    ) -> None:
        super().__init__(io.BytesIO(data), buffers=buffers)
        self._get = get

    def find_class(self, module: str, name: str) -> Any:
        if name == "reference" and module == __name__:
            return self._get
        return resolve_global(module, name, super().find_class)


def dump(value: Any, outbox: OutgoingBuffers, refer: Refer) -> tuple[bytes, list[int]]:
    """Pickle a value.

    Args:
        value: anything.
        outbox: takes the buffers that travel out of band.
        refer: gives tensors and references inside `value` an entry.

    Returns:
        The pickle, and the indices of its buffers in order.

    Raises:
        Unsendable: the value cannot be pickled; `__cause__` says why.
    """
    file, indices = io.BytesIO(), list[int]()

    def keep(buffer: pickle.PickleBuffer) -> bool:
        try:
            raw = buffer.raw()
        except BufferError:  # not contiguous
            return True
        if raw.nbytes <= IN_BAND_BYTES_MAX:
            return True
        indices.append(outbox.add(raw))
        return False

    try:
        _Pickler(file, refer, keep).dump(value)
    except (Unsendable, KeyboardInterrupt):
        raise
    except BaseException as error:  # the object's own code runs here
        raise Unsendable(value, _problem(value, error)) from error
    return file.getvalue(), indices


def load(data: Any, buffers: Sequence[memoryview], get: Callable[[int], Any]) -> Any:
    """Rebuild what `dump` was given; `get` returns the object of an entry.

    Raises:
        DecodeError: the value cannot be rebuilt; `__cause__` says why.
    """
    writable = [_writable(buffer) for buffer in buffers]
    try:
        return _Unpickler(data, writable, get).load()
    except (KeyboardInterrupt, DecodeError):
        raise
    except BaseException as error:  # a peer's SystemExit must not end this worker
        raise DecodeError(
            f"a pickled object could not be rebuilt: {words_of(error)}"
        ) from error


def _writable(buffer: memoryview) -> memoryview:
    if not buffer.readonly:
        return buffer
    return np.frombuffer(buffer, np.uint8).copy().data


def _problem(value: Any, error: BaseException) -> str:
    kind = type(value)
    return (
        f"a {kind.__module__}.{kind.__qualname__} cannot be pickled:"
        f" {words_of(error)}; send its parts, or give it"
        " __reduce__ or __getstate__"
    )
