"""Functions travel by name: `module:qualname`; others see `by_value`.

Naming checks that the name leads back to the same object, so that the peer cannot find
another one.  Resolving depends on the policy.  TRUSTED imports the named module.
STRICT looks only at modules that this program has imported already, and accepts only
objects that `expose` has marked or a pattern allows.  It compares the pattern with the
own name of the object found, not with the requested name: `allow=["app:*"]` does not
open objects that `app` has imported from elsewhere.
"""

from __future__ import annotations

import builtins
import contextlib
import fnmatch
import functools
import types
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, TypeVar

import torch

from asyncrpc import errors
from asyncrpc.core.arguments import set_mark, shown
from asyncrpc.core.serde.by_value import MARK as CODE
from asyncrpc.core.serde.by_value import (
    CodeName,
    CodeTable,
    ReceivedCode,
    goes_by_value,
    is_here_alone,
)
from asyncrpc.core.serde.naming import (
    ABSENT,
    find_name,
    import_module,
    imported_module,
    unnamed,
    walk,
)
from asyncrpc.core.serde.policy import Policy
from asyncrpc.errors import (
    AsyncRpcError,
    DecodeError,
    EncodeError,
    Outcome,
    RejectedError,
    UsageError,
)

MARK: Final = "__asyncrpc_exposed__"
NAMES_MAX: Final = 4096  # names kept per worker; programs call some tens of functions

# STRICT accepts these as arguments, but does not call them: bytes(1 << 40) would be an
# attack.
_PLAIN_TYPES: Final = {
    f"builtins:{plain.__name__}": plain
    for plain in (bool, int, float, complex, str, bytes, list, tuple, dict, set)
} | {"asyncrpc.errors:Outcome": Outcome}
# Functions and classes proper: they are sent by name, or not at all.
NAMED_TYPES: Final = (
    type,
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.ClassMethodDescriptorType,
    torch.jit.ScriptFunction,
)

T = TypeVar("T", bound=Callable[..., Any])


def expose(function_or_class: T) -> T:
    """Let peers call this on workers of policy STRICT.

    Args:
        function_or_class: a function; or a class, which exposes its constructor and its
            public methods, but no subclass.

    Returns:
        The same object.

    Raises:
        UsageError: `function_or_class` accepts no attributes, as a builtin: list its
            name in `Options.allow`.

    Example:
        >>> @expose
        ... def add(a: int, b: int) -> int:
        ...     return a + b
    """
    set_mark("function_or_class", function_or_class, MARK, True)  # noqa: FBT003  (a mark)
    return function_or_class


def describe_callable(
    table: FunctionTable, function: Any, *, is_here: bool = False
) -> tuple[Literal["name", "value"], Any]:
    """Return how a callable is sent; `is_here`: to this worker itself."""
    if not callable(function):
        raise UsageError(
            f"function must be callable, not {shown(function)}; pass the function"
            " itself, and its arguments after it"
        )
    try:
        if is_here and goes_by_value(function):
            with contextlib.suppress(EncodeError):
                return "name", find_name(function)
        return _form_of(table, function)
    except AsyncRpcError:
        raise
    except Exception as error:
        raise UsageError(
            f"function must be callable: inspecting {shown(function)} raised"
            f" {type(error).__name__}"
        ) from error


def _form_of(
    table: FunctionTable, function: Any
) -> tuple[Literal["name", "value"], Any]:
    if isinstance(function, functools.partial) or is_bound(function):
        return "value", function
    if isinstance(function, NAMED_TYPES):
        return "name", table.name_of(function)
    try:  # ufuncs, operators and other objects that may have a name
        return "name", table.name_of(function)
    except EncodeError:
        return "value", function


def is_bound(function: Any) -> bool:
    """Return whether this is a method of an instance, not of a class or a module."""
    kinds = (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)
    if not isinstance(function, kinds):
        return False
    return not isinstance(function.__self__, (type, types.ModuleType, types.NoneType))


class FunctionTable:
    """Maps functions to names and back, for one worker."""

    def __init__(
        self,
        policy: Policy,
        allow: Sequence[str] = (),
        *,
        main_travels: bool = False,
    ) -> None:
        self.policy = policy
        self.allow = tuple(allow)
        self.error_types: dict[type, type] = {}  # see `exceptions`: bounded there
        self.code = (
            CodeTable(main_travels=main_travels) if policy is Policy.TRUSTED else None
        )
        self._names: dict[Any, str] = {}
        # Returns whether peers have the code of a name as it is here; may refuse it.
        self.check_name: Callable[[str], bool] | None = None

    def name_of(self, function: Any) -> str:
        """Return the name that leads back to `function`."""
        if is_bound(function):
            raise unnamed(function, "is bound to an instance", "send it as a value")
        try:
            known = self._names.get(function)
        except TypeError:  # callable, but not hashable
            return find_name(function)
        return known or self._name_anew(function)

    def _name_anew(self, function: Any) -> str:
        code = self.code
        if code is not None and goes_by_value(function):
            known = code.known_name(function)
            if known is not None:
                return known
            if code.takes(function):
                return code.add(function)
        name = find_name(function)
        if self.check_name is not None:
            self.check_name(name)
        if len(self._names) >= NAMES_MAX:
            self._names = {}
        self._names[function] = name
        return name

    def known_code(self, function: object) -> CodeName | None:
        """Return the name of code that has travelled before, None for others."""
        return None if self.code is None else self.code.known_name(function)

    def travels_by_value(self, cls: type) -> bool:
        """Return whether no name leads to a class, which can travel by value."""
        try:
            return type(self.name_of(cls)) is CodeName
        except EncodeError:
            return False

    @property
    def main_travels(self) -> bool:
        """Whether functions of the main module travel by value."""
        return self.code is not None and self.code.main_travels

    def leads_here_alone(self, name: str) -> bool:
        """Return whether other workers need another name for a function."""
        return self.main_travels and is_here_alone(name.partition(":")[0])

    def let_main_travel(self) -> None:
        """Send functions of the main module by value from now on."""
        if self.code is not None:
            self._names = {}
            self.code.let_main_travel()

    def received(self, name: str) -> ReceivedCode:
        """Return what a peer has sent by value; raise as `resolve`."""
        if self.code is None:
            raise self._rejection(name)
        return self.code.received(name)

    def resolve(self, name: str) -> Callable[..., Any]:
        """Return the function that a peer named."""
        function = self._find(name)
        if not callable(function):
            raise DecodeError(
                f"{name!r} names a {type(function).__name__}, not a function"
            )
        return function  # type: ignore[no-any-return]

    def resolve_argument(self, name: str) -> Callable[..., Any]:
        """Return the function or class that was sent as a value; raise as `resolve`."""
        return _PLAIN_TYPES.get(name) or self.resolve(name)

    def resolve_error(self, name: str) -> type[BaseException]:
        """Return the exception class that a peer named.

        Builtin exceptions and asyncrpc's own need no permission.  Raise as `resolve`.
        """
        module, _, qualname = name.partition(":")
        home = {"builtins": builtins, errors.__name__: errors}.get(module)
        cls = vars(home).get(qualname) if home else self._find(name)
        if not isinstance(cls, type) or not issubclass(cls, BaseException):
            raise DecodeError(f"{name!r} does not name an exception")
        return cls

    def is_allowed(self, function: Any) -> bool:
        """Return whether a peer may call this; under TRUSTED it may call anything."""
        if self.policy is Policy.TRUSTED or _is_marked(function):
            return True
        try:
            name = self.name_of(function)
        except EncodeError:
            return False
        return self._matches(name) or _is_marked_method(name)

    def is_allowed_method(self, cls: type, name: str) -> bool:
        """Return whether a peer may call method `name` of an instance of `cls`."""
        if self.policy is Policy.TRUSTED:
            return True
        # Look in the classes only: that runs no property or `__getattr__`, and the
        # instance may hold any callable.
        homes = (vars(base) for base in cls.__mro__)
        method = next((home[name] for home in homes if name in home), None)
        if isinstance(method, (staticmethod, classmethod)):
            method = method.__func__
        if not isinstance(method, NAMED_TYPES) or isinstance(method, type):
            return False
        if _is_marked(cls) and not name.startswith("_"):
            return True
        return self.is_allowed(getattr(cls, name))

    def check(self, function: Any) -> None:
        """Refuse a function that a peer may not call."""
        if not self.is_allowed(function):
            raise RejectedError(
                f"{function!r:.100} may not be called on this worker, whose policy is "
                "strict; mark it with @asyncrpc.expose, or list it in Options.allow, "
                'such as "torch.optim.*:*"',
                outcome=Outcome.NOT_EXECUTED,
            )

    def check_method(self, cls: type, name: str) -> None:
        """Refuse a method of instances of `cls` that a peer may not call."""
        if not self.is_allowed_method(cls, name):
            kind = cls.__qualname__
            raise RejectedError(
                f"{kind}.{name} is not exposed here; mark {kind} with @asyncrpc.expose,"
                " or list it in Options.allow",
                outcome=Outcome.NOT_EXECUTED,
            )

    def _matches(self, name: str) -> bool:
        if name in self.allow:
            return True
        if any(part.startswith("_") for part in name.partition(":")[2].split(".")):
            return False  # private names are allowed only by their whole name
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.allow)

    def _find(self, name: str) -> Any:
        if name.startswith(CODE):
            return self.received(name).function
        module_name, _, qualname = name.partition(":")
        if not module_name or not qualname:
            raise DecodeError(f"a function's name must be 'module:name', not {name!r}")
        strict = self.policy is Policy.STRICT
        if strict and name not in self.allow and _leads_inside(qualname):
            raise self._rejection(name)
        module = (
            imported_module(module_name) if strict else import_module(module_name, name)
        )
        if module is None:
            raise self._rejection(name)
        parent, value = walk(module, qualname, lazily=not strict)
        if value is ABSENT:
            if strict:  # as for functions that are not allowed: no probing
                raise self._rejection(name)
            raise DecodeError(
                f"module {module_name!r} has no {qualname!r} on this worker; does it"
                " run the same code as the caller?"
            )
        if strict and not self._may(parent, qualname, value):
            raise self._rejection(name)
        return value

    def _may(self, parent: Any, qualname: str, value: Any) -> bool:
        last = qualname.rpartition(".")[2]
        if _is_marked_parent(parent, last, value):
            return True
        return self.is_allowed(value)

    def _rejection(self, name: str) -> RejectedError:
        return RejectedError(
            f"{name!r} may not be called on this worker, whose policy is strict; mark"
            " it with @asyncrpc.expose or list it in Options.allow, in a module that"
            " its program has imported",
            outcome=Outcome.NOT_EXECUTED,
        )


# --- marks ---------------------------------------------------------------------------


def _leads_inside(qualname: str) -> bool:
    """Return whether a name leads through Python's own attributes, as `__class__`."""
    return any(part.startswith("__") for part in qualname.split("."))


def _is_marked(value: Any) -> bool:
    if isinstance(value, type):
        return MARK in vars(value)  # a subclass is not exposed by its base
    return getattr(value, MARK, False) is True


def _is_marked_parent(parent: Any, name: str, value: Any) -> bool:
    if not isinstance(parent, type) or not _is_marked(parent):
        return False
    kinds = (types.FunctionType, types.MethodType)
    return not name.startswith("_") and isinstance(value, kinds)


def _is_marked_method(name: str) -> bool:
    module_name, _, qualname = name.partition(":")
    module = imported_module(module_name)
    if module is None or "." not in qualname:
        return False
    parent, value = walk(module, qualname)
    return _is_marked_parent(parent, qualname.rpartition(".")[2], value)
