"""The exported names of the package, and the methods of exported classes."""

from __future__ import annotations

import importlib
import inspect
import re
import types
from collections.abc import Iterator
from typing import Any

from tests.architecture.sources import REPOSITORY

API = REPOSITORY / "docs" / "reference" / "api.md"
_ROW = re.compile(r"^\| \[`([\w.]+)`\]", re.MULTILINE)
_DESCRIBED, _, _FURTHER = API.read_text(encoding="utf-8").partition("\n## ")
# Public modules, each with its `__all__`: those that have a page made of docstrings,
# and those whose names are torch's, or are described by a how-to page.
MODULES = tuple(_ROW.findall(_DESCRIBED))
FURTHER_MODULES = tuple(_ROW.findall(_FURTHER))


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
    objects: dict[str, Any] = {}
    seen: set[int] = set()
    for name, public in exported():
        if id(public) in seen:
            continue
        seen.add(id(public))
        objects[name] = public
        if inspect.isclass(public):
            for base in public.__mro__:
                if is_ours(base):
                    objects.update(methods_of(name, base))
    return sorted(objects.items())


def public_places() -> set[str]:
    """Return where what is public is defined: modules and qualified names in them."""
    places: set[str] = set()
    for module in map(importlib.import_module, (*MODULES, *FURTHER_MODULES)):
        for name in getattr(module, "__all__", ()):
            public = getattr(module, name)
            if inspect.isclass(public):
                for base in filter(is_ours, public.__mro__):
                    place = f"{base.__module__}.{base.__qualname__}"
                    places.add(place)
                    places.update(f"{place}.{attribute}" for attribute in vars(base))
            elif inspect.isfunction(public):
                places.add(f"{public.__module__}.{public.__qualname__}")
    return places
