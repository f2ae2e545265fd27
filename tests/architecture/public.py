"""What the package exports, and the methods of what it exports."""

from __future__ import annotations

import importlib
import inspect
import types
from collections.abc import Iterator
from typing import Any

# Public modules, each with its `__all__`; `asyncrpc.compat` has torch's names.
MODULES = (
    "asyncrpc",
    "asyncrpc.autograd",
    "asyncrpc.collectives",
    "asyncrpc.ddp",
    "asyncrpc.devices",
    "asyncrpc.devices.xla",
    "asyncrpc.errors",
    "asyncrpc.functions",
    "asyncrpc.inspection",
    "asyncrpc.multiprocessing",
    "asyncrpc.nn",
    "asyncrpc.observability",
    "asyncrpc.optim",
    "asyncrpc.ray",
    "asyncrpc.serving",
    "asyncrpc.serving.asgi",
    "asyncrpc.testing",
    "asyncrpc.trace",
)


def exported() -> Iterator[tuple[str, Any]]:
    """Yield what the public modules export, but for modules, by its dotted name."""
    for module in map(importlib.import_module, MODULES):
        for name in module.__all__:
            public = getattr(module, name)
            if not isinstance(public, types.ModuleType) and is_ours(public):
                yield f"{module.__name__}.{name}", public


def is_ours(public: object) -> bool:
    return str(getattr(public, "__module__", "")).startswith("asyncrpc")


def methods_of(name: str, public: type) -> Iterator[tuple[str, Any]]:
    for attribute, value in vars(public).items():
        unwrapped = getattr(value, "__func__", value)  # of static and class methods
        if attribute.startswith("_") or not inspect.isfunction(unwrapped):
            continue
        yield f"{name}.{attribute}", unwrapped


def described() -> list[tuple[str, Any]]:
    """Return what is exported, and the public methods of classes, each once."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    for name, public in exported():
        if id(public) in seen:
            continue
        seen.add(id(public))
        found[name] = public
        if inspect.isclass(public):
            for base in public.__mro__:
                if is_ours(base):
                    found.update(methods_of(name, base))
    return sorted(found.items())
