"""Pickle, protocol 5, for values without a better form; policy TRUSTED only.

Tensors and references inside a pickled object are not pickled: they get an entry in the
table like any other, and the pickle refers to it; see `reducing`.  Large buffers of
objects that support it, as numpy arrays do, travel out of band.

Unpickling runs the sender's code by design.  All its failures become `DecodeError`.
"""

from __future__ import annotations

import io
import pickle
import types
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from asyncrpc.core.serde.encoded import OutgoingBuffers
from asyncrpc.core.serde.exceptions import words_of
from asyncrpc.core.serde.naming import resolve_global
from asyncrpc.core.serde.reducing import Reducers, reference
from asyncrpc.core.serde.unsendable import Unsendable
from asyncrpc.errors import DecodeError

# Shorter buffers are cheaper inside the pickle than as a buffer of the message.
IN_BAND_BYTES_MAX: Final = 16 << 10

Keep = Callable[[pickle.PickleBuffer], bool]


class _CarefulPickler(pickle.Pickler):
    """Pickles once more what failed, and knows which object did.

    It also sends functions that only their name in the table leads to, and classes that
    travel by value: the quick pickler does not ask about functions and classes.
    """

    def __init__(self, file: io.BytesIO, keep: Keep, reducers: Reducers) -> None:
        super().__init__(file, protocol=5, buffer_callback=keep)
        self.dispatch_table = reducers
        self.last: object = None
        self._reducers = reducers

    def reducer_override(self, obj: Any) -> Any:
        self.last = obj
        if type(obj) is types.FunctionType and obj is not reference:
            return self._reducers.reduce_function(obj)
        if isinstance(obj, type):
            return self._reducers.reduce_class(obj)
        return NotImplemented


class _Unpickler(pickle.Unpickler):  # noqa: S301 - policy TRUSTED only
    def __init__(
        self, data: Any, buffers: Sequence[memoryview], get: Callable[[int], Any]
    ) -> None:
        super().__init__(io.BytesIO(data), buffers=buffers)
        self._get = get

    def find_class(self, module: str, name: str) -> Any:
        if name == reference.__name__ and module == reference.__module__:
            return self._get
        return resolve_global(module, name, super().find_class)


def dump(
    value: Any, outbox: OutgoingBuffers, reducers: Reducers
) -> tuple[bytes, list[int]]:
    """Pickle a value."""
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
        pickler = pickle.Pickler(file, protocol=5, buffer_callback=keep)
        pickler.dispatch_table = reducers
        pickler.dump(value)
        is_right = not _names(reducers.lone_modules, file)
    except (Unsendable, KeyboardInterrupt):
        raise
    except BaseException:  # noqa: BLE001  (the object's own code runs here)
        is_right = False
    if not is_right:
        file, indices = io.BytesIO(), []
        reducers.small_tensors.give_up()
        _dump_carefully(value, _CarefulPickler(file, keep, reducers))
    return file.getvalue(), indices


def _dump_carefully(value: Any, careful: _CarefulPickler) -> None:
    try:
        careful.dump(value)
    except (Unsendable, KeyboardInterrupt):
        raise
    except (RecursionError, MemoryError) as error:
        # Any container or text may be at fault: `last` knows objects alone.
        raise Unsendable(value, _excess(error)) from error
    except BaseException as error:
        raise Unsendable(careful.last, _problem(careful.last, error)) from error


def _names(modules: set[str], file: io.BytesIO) -> bool:
    """Return whether a pickle names a module; that it holds its name suffices.

    To ask about each class instead would take every pickle 0.1 us an object.
    """
    pickled = file.getvalue() if modules else b""
    return any(name.encode() in pickled for name in modules)


def load(data: Any, buffers: Sequence[memoryview], get: Callable[[int], Any]) -> Any:
    """Rebuild what `dump` was given; `get` returns the object of an entry."""
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


def _excess(error: RecursionError | MemoryError) -> str:
    """Return why a value that is too much for a pickle cannot be sent."""
    text = f"it cannot be pickled: {words_of(error)}"
    if isinstance(error, MemoryError):
        return f"{text}; send it in parts, or stream it"
    return f"{text}; it is nested too deep, or its __reduce__ never ends: flatten it"
