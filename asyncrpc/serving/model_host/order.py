"""The order that a model process gets from the web worker that starts it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import spawn
from pathlib import Path
from typing import Any, Final

from asyncrpc import Options
from asyncrpc.core.arguments import wrong
from asyncrpc.core.serde.naming import ABSENT, find_name, walk
from asyncrpc.errors import EncodeError, UsageError

_MAIN: Final = "__main__"
# Keys of multiprocessing's own record of a main module.
_MAIN_KEYS: Final = ("init_main_from_path", "init_main_from_name")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOrder:
    """The data that a model process needs to start.

    Attributes:
        function: the function that makes the model, as `module:qualname`.
        version: the version that the web worker wants.
        linger_s: seconds that it waits for web workers once all have left.
        options: of its worker, without the secret.
        main: how to import the main module of the web worker, if the function is there.
        secret: of the slot; not shown in any text.
    """

    name: str
    function: str
    version: str
    generation: str
    linger_s: float
    folder: str
    options: Options
    main: Mapping[str, str]
    secret: bytes = field(repr=False)

    @property
    def path(self) -> Path:
        """The directory of its slot."""
        return Path(self.folder)


def name_of_function(function: Callable[[], Any] | str) -> str:
    """Return the name by which another process imports a function."""
    if not isinstance(function, str):
        if not callable(function):
            raise wrong("make_model", _WANTED, function)
        try:
            return find_name(function)
        except EncodeError as error:
            raise UsageError(
                f"make_model cannot be imported by another process: {error}"
            ) from error
        except Exception as error:  # the object's own code
            raise wrong("make_model", _WANTED, function) from error
    module, colon, qualname = function.partition(":")
    if not (colon and qualname and all(map(str.isidentifier, module.split(".")))):
        raise wrong("make_model", _WANTED, function)
    return function


_WANTED: Final = (
    'a function at the top level of a module, or its name "module:function"'
)


def file_of(function: str) -> str:
    """Return the file of the module in which a function is; blocks this thread."""
    name = function.partition(":")[0]
    module = sys.modules.get(name)
    if module is not None:
        return str(getattr(module, "__file__", "") or "")
    try:
        spec = find_spec(name)
    except ImportError as error:
        raise UsageError(f"make_model: {function!r}: {error}") from error
    if spec is None:
        raise UsageError(
            f"make_model: {function!r}: there is no module {name!r} in the import path "
            "of this program (sys.path)"
        )
    return spec.origin or ""


def main_for(function: str) -> Mapping[str, str]:
    """Return how to import the main module, if a function is there; else nothing.

    Source: multiprocessing does the same with the method `spawn`.
    """
    if function.partition(":")[0] != _MAIN:
        return {}
    preparation = spawn.get_preparation_data("")
    main = {key: str(preparation[key]) for key in _MAIN_KEYS if preparation.get(key)}
    if not main:
        raise UsageError(
            f"make_model: {function!r} is in a program that is not a file; put it into "
            "a module"
        )
    return main


def resolve(order: HostOrder) -> Callable[[], Any]:
    """Import the function of an order; blocks this thread."""
    if order.main:
        spawn.prepare(dict(order.main))
    module, _, qualname = order.function.partition(":")
    target = walk(import_module(module), qualname)[1]
    if target is ABSENT or not callable(target):
        raise UsageError(f"make_model: module {module!r} has no function {qualname!r}")
    function: Callable[[], Any] = target
    return function
