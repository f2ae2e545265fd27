"""What a package loads at once, and names that it loads when they are first used.

    if TYPE_CHECKING:
        from asyncrpc.parallel.pipeline.pipeline import Pipeline
    else:
        __getattr__, __dir__ = names_on_demand(
            __name__, {"Pipeline": "asyncrpc.parallel.pipeline.pipeline"}
        )

Type checkers and editors see plain imports.  The first use imports the module, in the
thread that asks; after it the name is an ordinary attribute of the package.

Source: PEP 562.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any


def names_on_demand(
    package: str, modules: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and the `__dir__` of a package."""

    def get(name: str) -> Any:
        module = modules.get(name)
        if module is None:
            text = f"module {package!r} has no attribute {name!r}"
            raise AttributeError(text, name=name, obj=sys.modules[package])
        value: Any = import_module(module)
        if module != f"{package}.{name}":
            value = getattr(value, name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules})

    return get, names


@contextmanager
def no_collection() -> Iterator[None]:
    """Collect no garbage while modules are imported, which make none.

    A collection amid them would visit all objects of torch: 90 ms of 290.  So would one
    soon after them, amid the first calls, if what they made counted as new.  Frozen and
    thawed, it is of the oldest generation.  What the program has frozen stays so.
    """
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()
        if is_enabled:
            gc.enable()
