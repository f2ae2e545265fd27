"""Where objects are: from a function to the name that leads to it, and back.

`functions` applies the policy; this module only looks names up.
"""

from __future__ import annotations

import enum
import importlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from asyncrpc.errors import DecodeError, EncodeError, Outcome

# Where to find builtins whose `__module__` is missing or names a private module.
_HOMES: Final = (
    "torch",
    "torch.nn.functional",
    "torch.linalg",
    "torch.special",
    "torch.fft",
    "torch.sparse",
    "operator",
    "math",
    "builtins",
    "numpy",
)
_MANGLED: Final = "___torch_mangle_"


class _Absent(enum.Enum):
    ABSENT = enum.auto()


ABSENT: Final = _Absent.ABSENT


# --- from names to objects -----------------------------------------------------------


def imported_module(name: str) -> types.ModuleType | None:
    """Return an imported module; the caller's `__main__` stands for ours."""
    module = sys.modules.get(name)
    if module is None and name == "__mp_main__":
        module = sys.modules.get("__main__")
    return module


def resolve_global(module: str, name: str, find: Callable[[str, str], Any]) -> Any:
    """Find an object that a pickle names; the caller's `__main__` stands for ours."""
    if module == "__mp_main__" and module not in sys.modules:
        module = "__main__"
    return find(module, name)


def import_module(name: str, function: str) -> types.ModuleType:
    """Import the module of a function; raise DecodeError if that fails."""
    module = imported_module(name)
    if module is not None:
        return module
    try:
        return importlib.import_module(name)
    except Exception as error:  # any module's code may run here
        raise DecodeError(
            f"function {function!r} needs module {name!r}, which this worker cannot"
            f" import: {type(error).__name__}: {error}"
        ) from error


def walk(module: Any, qualname: str, *, lazily: bool = True) -> tuple[Any, Any]:
    """Follow a dotted name through classes; return the last parent and the object.

    It does not follow modules: `app:os.system` would reach whatever `app` imports.
    With `lazily`, a module may make a missing attribute, which can import.
    """
    first, *rest = qualname.split(".")
    parent, value = module, vars(module).get(first, ABSENT)
    if value is ABSENT and lazily:
        value = _attribute(module, first)
    for part in rest:
        if not isinstance(value, type):
            return value, ABSENT
        parent, value = value, _attribute(value, part)
    return parent, value


def _attribute(parent: Any, name: str) -> Any:
    try:
        return getattr(parent, name, ABSENT)
    except Exception:  # noqa: BLE001 - the code of a descriptor, or of a module
        return ABSENT


# --- from objects to names -----------------------------------------------------------


def find_name(function: Any) -> str:
    """Return the name that leads to a function; raise EncodeError if none does."""
    if isinstance(function, torch.jit.ScriptFunction):
        return _script_name(function)
    for module, qualname in _candidates(function):
        if _leads_to(module, qualname, function):
            return f"{'__main__' if module == '__mp_main__' else module}:{qualname}"
    raise _reason(function)


def find_method(method: Any) -> str | None:
    """Return the name by which an instance has a bound method; None if it has none."""
    name = str(getattr(method, "__name__", ""))
    if not isinstance(method, types.MethodType):  # of a builtin class
        return name
    function, instance = method.__func__, method.__self__
    homes = [vars(base) for base in type(instance).__mro__]
    if next((home[name] for home in homes if name in home), ABSENT) is function:
        return name
    if _attribute(instance, name) == method:  # its own, or that of a descriptor
        return name
    for home in homes:  # a decorator has given it another name
        for other, value in list(home.items()):
            if value is function and _attribute(instance, other) == method:
                return other
    return None


def _script_name(function: torch.jit.ScriptFunction[Any, Any]) -> str:
    """Return the name of a compiled function; raise EncodeError if it has none."""
    # torch's own name for it: `__torch__.module.function`, without the module for
    # `__main__`, and with a part of torch's if a function of that name came before.
    parts = str(function.qualified_name).split(".")
    parts = [part for part in parts if not part.startswith(_MANGLED)]
    simple = parts[-1]
    home = ".".join(parts[1:-1]) or "__main__"
    held = vars(imported_module(home) or object).items()
    for name in [simple, *(name for name, value in list(held) if value is function)]:
        if _leads_to(home, name, function):
            return f"{'__main__' if home == '__mp_main__' else home}:{name}"
    raise unnamed(
        function,
        f"is a compiled TorchScript function that cannot be found as {home}:{simple}",
        "compile it where it is defined, with @torch.jit.script at module level",
    )


def _candidates(function: Any) -> Iterator[tuple[str, str]]:
    """Yield modules and names where a function may be found, the likeliest first."""
    module = getattr(function, "__module__", None)
    simple = str(getattr(function, "__name__", ""))
    qualname = str(getattr(function, "__qualname__", simple))
    owner = getattr(function, "__self__", None)
    if isinstance(owner, type):  # of a class method
        yield owner.__module__, f"{owner.__qualname__}.{simple}"
    builtin = not isinstance(function, (types.FunctionType, type))
    if builtin and not (isinstance(module, str) and _is_public(module)):
        yield from _homes(function, simple)
    if isinstance(module, str):
        yield module, qualname
        yield module, simple
    holder = getattr(function, "__objclass__", None)  # of a method descriptor
    if isinstance(holder, type):
        yield holder.__module__, qualname
    if builtin:
        yield from _homes(function, simple)


def _is_public(module: str) -> bool:
    return not any(part.startswith("_") for part in module.split("."))


def _homes(function: Any, simple: str) -> Iterator[tuple[str, str]]:
    yield "torch", f"Tensor.{simple}"
    for home in _HOMES:
        module = sys.modules.get(home)
        if module is None:
            continue
        yield home, simple
        for name, value in list(vars(module).items()):
            if value is function:
                yield home, name


def _leads_to(module_name: str, qualname: str, function: Any) -> bool:
    module = imported_module(module_name)
    if module is None or not qualname or "<" in qualname:
        return False
    value = walk(module, qualname)[1]
    if not isinstance(function, (types.MethodType, types.BuiltinMethodType)):
        return value is function
    # Each look-up binds a class method anew; the results are equal.
    return type(value) is type(function) and bool(value == function)


def _reason(function: Any) -> EncodeError:
    qualname = str(getattr(function, "__qualname__", ""))
    if "<lambda>" in qualname:
        return unnamed(function, "is a lambda", "make it a function at module level")
    if "<locals>" in qualname:
        return unnamed(
            function,
            "is defined inside a function",
            "move it to module level, and pass what it closes over as arguments",
        )
    module = getattr(function, "__module__", None)
    return unnamed(
        function,
        f"is not the object found as {module}:{qualname or '?'}",
        "give it a name at module level; a decorator may have replaced it there",
    )


def unnamed(function: Any, problem: str, advice: str) -> EncodeError:
    """Return the error about a function that has no name."""
    shown = getattr(function, "__qualname__", None) or type(function).__qualname__
    return EncodeError(
        f"{shown} cannot be sent: it {problem}, and functions travel by name; {advice}",
        outcome=Outcome.NOT_EXECUTED,
    )
