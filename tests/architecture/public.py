"""The exported names of the package, and the methods of exported classes."""

from __future__ import annotations

import importlib
import inspect
import types
from collections.abc import Iterator
from typing import Any

# Public modules, each with its `__all__`, that docs/reference/api.md describes.
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
# Public modules that api.md does not describe: their names are torch's, or a how-to
# page describes them.
FURTHER_MODULES = (
    "asyncrpc.collectives.torch_backend",
    "asyncrpc.compat",
    "asyncrpc.compat.autograd",
    "asyncrpc.compat.nn",
    "asyncrpc.compat.optim",
    "asyncrpc.compat.profiling",
    "asyncrpc.compat.rpc",
    "asyncrpc.testing.fake_device",
)


def exported() -> Iterator[tuple[str, Any]]:
    """Yield the exports of the public modules, except modules, by dotted name."""
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
    """Return all exports, and the public methods of exported classes, each once."""
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
