"""Exceptions taken apart and put together again, without their constructors.

The arguments of a constructor need not be `args`: to call it with `args`, as pickle
does, fails for every exception with two arguments and one message.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any, Final

# Attributes of every exception, which are sent separately or not at all.
_COMMON: Final = frozenset(dir(BaseException)) | {"__weakref__"}
_NEVER: Final = frozenset(
    {"obj", "exceptions", "message"}
)  # AttributeError's; a group's


def dismantle(error: BaseException) -> list[Any]:
    """Return `[args, __dict__, slots]`, from which `assemble` makes the exception."""
    args: list[Any] = list(error.args)
    if isinstance(error, BaseExceptionGroup):
        args = [error.message, list(error.exceptions)]
    return [args, dict(error.__dict__), dict(slots_of(error))]


def assemble(cls: type[BaseException], parts: list[Any]) -> BaseException:
    """Make an exception of `cls` from what `dismantle` returned."""
    args, state, slots = parts
    native = _native(cls)
    if issubclass(cls, BaseExceptionGroup):
        error: BaseException = BaseExceptionGroup.__new__(cls, *args)
    else:
        error = _new(cls, native)
        _initialize(error, native, args)
    for name, value in slots.items():
        if not name.startswith("__"):  # `slots_of` yields no such name
            _set(error, name, value)
    error.__dict__.update(state)
    return error


def _new(cls: type[BaseException], native: type[BaseException]) -> BaseException:
    try:
        return native.__new__(cls)
    except TypeError:  # MemoryError reuses instances, and so refuses a mixed class
        return BaseException.__new__(cls)


def _native(cls: type[BaseException]) -> type[BaseException]:
    """Return the builtin class whose memory layout `cls` has."""
    bases = [base for base in cls.__mro__ if base.__module__ == "builtins"]
    first: type[BaseException] = bases[0]
    for base in bases:
        if base not in (Exception, BaseException, object):
            return base
    return first


def _initialize(
    error: BaseException, native: type[BaseException], args: list[Any]
) -> None:
    # OSError takes errno and strerror from its arguments, UnicodeError needs exactly
    # five; both refuse other `args` of a subclass.
    try:
        native.__init__(error, *args)
    except (TypeError, ValueError):
        BaseException.__init__(error, *args)
    error.args = tuple(args)


def slots_of(error: BaseException) -> Iterator[tuple[str, Any]]:
    """Yield the attributes that are not in `__dict__`: errno, name..."""
    kinds = (types.MemberDescriptorType, types.GetSetDescriptorType)
    for cls in type(error).__mro__:
        for name, member in vars(cls).items():
            if name in _COMMON or name in _NEVER or not isinstance(member, kinds):
                continue
            try:
                value = getattr(error, name)
            except AttributeError:  # never set
                continue
            if value is not None:
                yield name, value


def _set(error: BaseException, name: str, value: Any) -> None:
    try:
        setattr(error, name, value)
    except (AttributeError, TypeError):  # read-only: the class sets it itself
        return
