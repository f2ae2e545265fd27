"""A plugin of pytest that has one module of the package mutated, in this process.

Which one, and how, is in the environment variable `MUTANT`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Final

from tests.property.machines.spec import Guard, mutated

MUTANT: Final = "ASYNCRPC_MUTANT"


def as_text(module: str, guard: Guard) -> str:
    return json.dumps([module, guard.name, guard.old, guard.new])


class _MutatedLoader(SourceFileLoader):
    """Loads one module from a source that it changes first; nothing is cached."""

    def __init__(self, name: str, path: str, guard: Guard) -> None:
        super().__init__(name, path)
        self._guard = guard

    def get_code(self, fullname: str) -> object:  # type: ignore[override]
        text = self.get_source(fullname)
        assert text is not None
        return compile(mutated(text, self._guard, fullname), self.path, "exec")


class _MutatedFinder(MetaPathFinder):
    """Finds that module before anybody else does."""

    def __init__(self, module: str, guard: Guard) -> None:
        self._module = module
        self._guard = guard

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname != self._module:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        assert spec is not None
        assert spec.origin is not None
        spec.loader = _MutatedLoader(fullname, spec.origin, self._guard)
        return spec


if MUTANT in os.environ:
    _module, *_guard = json.loads(os.environ[MUTANT])
    assert _module not in sys.modules, f"{_module} has been imported before"
    sys.meta_path.insert(0, _MutatedFinder(_module, Guard(*_guard)))
