"""Functions and classes as pickles, by cloudpickle: loaded when code first travels."""

from __future__ import annotations

import io
import pickle
from typing import TYPE_CHECKING, Any, Final

import cloudpickle
from cloudpickle import cloudpickle as internals

from asyncrpc.core.serde.by_value import (
    goes_by_value,
    in_main,
    is_here_alone,
    is_of_main,
)
from asyncrpc.core.serde.naming import resolve_global

if TYPE_CHECKING:
    from weakref import WeakSet

_MODULE: Final = internals.__name__


def dump(value: Any, *, main_travels: bool) -> bytes:
    """Return the pickle of a function, a class, or what belongs to one."""
    file = io.BytesIO()
    _Pickler(file, main_travels=main_travels).dump(value)
    return file.getvalue()


def load(content: bytes, classes: WeakSet[type]) -> Any:
    """Return what `dump` was given.

    Args:
        classes: those of peers; the ones that are made now are added.
    """
    return _CodeUnpickler(content, classes).load()


def part_of_main(qualname: str) -> Any:
    """Return what stands in a pickle for a function or class of the main module."""
    part = in_main(qualname)
    if part is None:
        raise LookupError(f"the main module of this program has no {qualname!r}")
    return part


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    def __init__(self, file: io.BytesIO, *, main_travels: bool) -> None:
        super().__init__(file, protocol=5)
        self._root: Any = None
        self._main_travels = main_travels

    def dump(self, value: Any) -> None:
        self._root = value
        super().dump(value)

    def reducer_override(self, obj: Any) -> Any:
        if goes_by_value(obj) and (self._main_travels or obj is not self._root):
            return self._reduce_code(obj)
        return super().reducer_override(obj)

    def _reduce_code(self, obj: Any) -> Any:
        if self._main_travels:
            if not is_here_alone(str(obj.__module__)):
                return super().reducer_override(obj)
            if isinstance(obj, type):  # where cloudpickle would go by the module's name
                return internals._dynamic_class_reduce(obj)  # noqa: SLF001
            return self._dynamic_function_reduce(obj)
        # Where all run the same program, its main module is not copied.
        if is_of_main(obj):
            return part_of_main, (obj.__qualname__,)
        return super().reducer_override(obj)


class _CodeUnpickler(pickle.Unpickler):  # noqa: S301 - policy TRUSTED only
    """Reads a pickle; a class that this process has defined stays as it is.

    cloudpickle gives each class an identity, by which it is found again where it comes
    from; but there it would overwrite the class with its own copy.
    """

    def __init__(self, content: bytes, classes: WeakSet[type]) -> None:
        super().__init__(io.BytesIO(content))
        self._classes = classes

    def find_class(self, module: str, name: str) -> Any:
        if module in {_MODULE, "cloudpickle"}:
            if name in {"_make_skeleton_class", "_make_skeleton_enum"}:
                return self._maker(getattr(internals, name))
            if name == "_class_setstate":
                return self._fill
        return resolve_global(module, name, super().find_class)

    def _maker(self, make: Any) -> Any:
        def make_and_note(*args: Any) -> type:
            identity = args[-2]
            is_new = identity not in internals._DYNAMIC_CLASS_TRACKER_BY_ID  # noqa: SLF001
            kind: type = make(*args)
            if is_new:
                self._classes.add(kind)
            return kind

        return make_and_note

    def _fill(self, kind: type, state: Any) -> type:
        if kind in self._classes:
            internals._class_setstate(kind, state)  # noqa: SLF001
        return kind
