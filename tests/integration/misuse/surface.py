"""What can be used wrongly: every public function and method, by its name.

They are found from `__all__`, so that a new one cannot be forgotten: a test asks for
its `Use`.  `CallOptions` is not there: its fields are the arguments of `using`.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import types
from collections.abc import Iterator, Mapping
from typing import Any, Final

import asyncrpc
from asyncrpc.core.options import CallOptions
from tests.architecture.public import MODULES as PUBLIC_MODULES

MODULES: Final = tuple(
    module for module in PUBLIC_MODULES if module != "asyncrpc.errors"
)
# Methods that are no names, and are used as such.
_SPECIAL: Final = ("__init__", "__call__", "__aenter__", "__anext__", "__getitem__")


def surface() -> Mapping[str, tuple[str, ...]]:
    """Return every public function and method with the names of its parameters."""
    parameters: dict[str, tuple[str, ...]] = {}
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for name in module.__all__:
            public = getattr(module, name)
            if module_name != "asyncrpc" and public is getattr(asyncrpc, name, None):
                continue  # it is at the top level, too
            prefix = module_name.removeprefix("asyncrpc").removeprefix(".")
            for use, function in _uses(f"{prefix}.{name}" if prefix else name, public):
                parameters[use] = _parameters(function)
    for use, function in _uses("CallOptions", CallOptions):
        parameters[use] = _parameters(function)
    return parameters


def _uses(shown: str, public: Any) -> Iterator[tuple[str, Any]]:
    if inspect.isclass(public):
        if not issubclass(public, BaseException | enum.Enum):
            yield from _methods(shown, public)
    elif isinstance(public, types.FunctionType):
        yield shown, public


def _methods(shown: str, public: type) -> Iterator[tuple[str, Any]]:
    seen = set()
    for base in public.__mro__:
        if not base.__module__.startswith("asyncrpc"):
            continue
        for name, member in vars(base).items():
            is_named = not name.startswith("_") or name in _SPECIAL
            inner = member.__func__ if hasattr(member, "__func__") else member
            if name in seen or not is_named or not inspect.isfunction(inner):
                continue
            seen.add(name)
            yield shown if name == "__init__" else f"{shown}.{name}", inner


def _parameters(function: Any) -> tuple[str, ...]:
    names = list(inspect.signature(function).parameters)
    return tuple(name for name in names if name not in ("self", "cls"))
