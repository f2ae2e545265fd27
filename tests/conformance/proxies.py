"""A module that stands in the place of one of torch's, and forwards to the facade's.

Reads and writes go through: a test that replaces `rpc.api._x` replaces the facade's.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import Any

from tests.conformance.placeholders import Marks, Missing


def is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


class Proxy(types.ModuleType):
    """Has the names of the first of its modules that has them."""

    def __init__(
        self,
        name: str,
        modules: Sequence[types.ModuleType],
        beside: Mapping[str, types.ModuleType],
        marks: Marks,
    ) -> None:
        """Make one.

        Args:
            beside: all proxies by name; among them are this one's submodules.
        """
        super().__init__(name)
        vars(self).update(
            _modules=tuple(modules),
            _beside=beside,
            _marks=marks,
            __path__=[],
            __file__=__file__,  # `inspect` looks at every module's file
        )

    def __getattr__(self, name: str) -> Any:
        if is_dunder(name):
            raise AttributeError(name)
        below = self._beside.get(f"{self.__name__}.{name}")
        if below is not None:
            return below
        home = self._home(name)
        if home is None:
            return Missing(f"{self.__name__}.{name}", self._marks)
        return getattr(home, name)

    def __setattr__(self, name: str, value: object) -> None:
        home = self._home(name) or next(iter(self._modules), None)
        if is_dunder(name) or home is None:
            super().__setattr__(name, value)
        else:
            setattr(home, name, value)

    def __delattr__(self, name: str) -> None:
        if name in vars(self):
            super().__delattr__(name)
        else:
            delattr(self._home(name), name)

    def __dir__(self) -> list[str]:
        return sorted({name for module in self._modules for name in dir(module)})

    def _home(self, name: str) -> types.ModuleType | None:
        modules: tuple[types.ModuleType, ...] = self._modules
        return next((module for module in modules if hasattr(module, name)), None)
