"""Loads changed modules anew, and reports what still holds what they were."""

from __future__ import annotations

import gc
import importlib
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Final

LINES_MAX: Final = 100  # of a report


def reload_modules(root: Path, paths: Sequence[str]) -> list[str]:
    """Load changed modules anew, and return what still refers to the former ones.

    In the order of their first import; what has not been imported needs nothing.
    """
    files = {str(root / path) for path in paths}
    changed = [module for module in _modules(root) if module.__file__ in files]
    former: list[Any] = []
    lines: list[str] = []
    for module in changed:
        own = _defined_in(module)
        importlib.reload(module)
        for name, value in own.items():
            if vars(module).get(name) is not value:
                former.append(value)
            else:  # a reload removes nothing
                path = f"{module.__name__}.{name}"
                lines.append(f"{path} has left its source, and is still there")
    if former:
        lines += [*_names_of(root, former), *_objects_of(former)]
    if len(lines) > LINES_MAX:
        lines[LINES_MAX:] = [f"and {len(lines) - LINES_MAX} more"]
    return lines


def _modules(root: Path) -> list[ModuleType]:
    """Return the modules of a folder that have been imported."""
    begin = f"{root}/"
    return [
        module
        for module in [*sys.modules.values()]
        if (getattr(module, "__file__", None) or "").startswith(begin)
    ]


def _defined_in(module: ModuleType) -> dict[str, Any]:
    """Return the functions and classes that the source of a module defines."""
    return {
        name: value
        for name, value in [*vars(module).items()]
        if isinstance(value, (type, FunctionType))
        and value.__module__ == module.__name__
    }


def _names_of(root: Path, former: Sequence[Any]) -> Iterator[str]:
    """Yield which names of modules refer to former functions and classes."""
    names = {id(value): f"{value.__module__}.{value.__qualname__}" for value in former}
    for module in _modules(root):
        for name, value in vars(module).items():
            if (named := names.get(id(value))) is not None:
                yield f"{module.__name__}.{name} is still the former {named}"


def _objects_of(former: Sequence[Any]) -> Iterator[str]:
    """Yield of which former classes there are objects."""
    classes = {id(value): value for value in former if isinstance(value, type)}
    if not classes:
        return
    counts = Counter(id(type(value)) for value in gc.get_objects())
    for key, cls in classes.items():
        if count := counts[key]:
            objects = "1 object is" if count == 1 else f"{count} objects are"
            yield f"{objects} still of the former {cls.__module__}.{cls.__qualname__}"
