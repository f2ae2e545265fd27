"""Checks of users' arguments, which name the argument in the error.

A wrong argument is the program's fault, so each check raises `UsageError`, whose text
names the argument, says what it must be, and shows what it was.  Showing a value runs
its `__repr__`, which may raise, or never end: `shown` never raises, and is short.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, Final, TypeGuard

from asyncrpc.core.ids import NAME_CHARACTERS_MAX, is_name
from asyncrpc.errors import UsageError

UNSET: Final = object()  # "the worker's own default", where None means "no limit"

_SHOWN_CHARACTERS: Final = 60
_SHORT: Final = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHOWN_CHARACTERS


def shown(value: object) -> str:
    """Return a value as an error shows it: short, with its type."""
    if value is None or isinstance(value, bool):
        return repr(value)
    kind = type(value).__qualname__[:_SHOWN_CHARACTERS]
    try:
        text = _words(value)
    except KeyboardInterrupt:
        raise
    except BaseException as problem:  # noqa: BLE001  (the value's own code)
        return f"an object of type {kind}, whose repr raised {type(problem).__name__}"
    if len(text) > _SHOWN_CHARACTERS:
        text = f"{text[:_SHOWN_CHARACTERS]}..."
    return f"{text} of type {kind}"


def _words(value: Any) -> str:
    """Return the text of a value; of a large value, only a part."""
    if type(value).__module__ == "torch" and hasattr(value, "shape"):
        return f"a tensor of shape {tuple(value.shape)}, {value.dtype},"
    return _SHORT.repr(value)


def wrong(name: str, wanted: str, value: object) -> UsageError:
    """Return the error about an argument that is not what it must be."""
    return UsageError(f"{name} must be {wanted}, not {shown(value)}")


def check_kind(
    name: str, value: object, kinds: type | tuple[type, ...], wanted: str
) -> None:
    """Raise UsageError unless an argument is of one of these types.

    True and False count as numbers only where `bool` is named.
    """
    is_stray_bool = isinstance(value, bool) and not _names_bool(kinds)
    if is_stray_bool or not isinstance(value, kinds):
        raise wrong(name, wanted, value)


def is_seconds(value: object) -> TypeGuard[float]:
    """Return whether a value is a real number other than NaN."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    return is_number and value == value  # noqa: PLR0124  (NaN != NaN)


def check_timeout(name: str, value: Any) -> None:
    """Raise UsageError unless an argument is None or seconds, 0 or more."""
    if value is not None:
        check_seconds(name, value, at_least=0)


def check_duration(name: str, value: Any) -> None:
    """Raise UsageError unless an argument is finite seconds, 0 or more."""
    if not is_seconds(value) or not 0 <= value < math.inf:
        raise wrong(name, "a finite number of seconds, 0 or more", value)


def check_flag(name: str, value: object) -> None:
    """Raise UsageError unless an argument is True or False."""
    if value is not True and value is not False:
        raise wrong(name, "True or False", value)


def check_seconds(name: str, value: Any, *, at_least: float | None = None) -> None:
    """Raise UsageError unless an argument is a number of seconds, large enough."""
    if not is_seconds(value) or (at_least is not None and value < at_least):
        least = "" if at_least is None else f", {at_least:g} or more"
        raise wrong(name, f"a number of seconds{least}, or None for no limit", value)


def check_count(
    name: str, value: Any, *, at_least: int = 0, at_most: int | None = None
) -> None:
    """Raise UsageError unless an argument is an integer within limits."""
    is_low = type(value) is not int or value < at_least
    if is_low or (at_most is not None and value > at_most):
        most = "" if at_most is None else f" and at most {at_most}"
        raise wrong(name, f"an integer of at least {at_least}{most}", value)


def check_flags(**flags: object) -> None:
    """Raise UsageError unless each of these named arguments is True or False."""
    for name, value in flags.items():
        check_flag(name, value)


def check_above(name: str, value: Any, least: float) -> None:
    """Raise UsageError unless an argument is a real number above `least`."""
    if not is_seconds(value) or not value > least:
        raise wrong(name, f"a number above {least:g}", value)


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise UsageError unless an argument is one of several strings."""
    if type(value) is not str or value not in choices:
        raise wrong(name, " or ".join(map(repr, choices)), value)


def check_sequence(name: str, value: object, wanted: str) -> None:
    """Raise UsageError unless an argument is a list, tuple or alike, and not text."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise wrong(name, wanted, value)


def listed(name: str, value: Any, wanted: str) -> list[Any]:
    """Return the items of an argument, which may be a generator."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise wrong(name, wanted, value)
    try:
        return list(value)
    except Exception as error:  # the value's own code
        raise wrong(name, wanted, value) from error


def check_text(name: str, value: object, *, at_most: int | None = None) -> None:
    """Raise UsageError unless an argument is a non-empty string that can be sent."""
    if not isinstance(value, str) or not value:
        raise wrong(name, "a non-empty string", value)
    if at_most is not None and len(value) > at_most:
        raise wrong(name, f"a string of at most {at_most} characters", value)
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise wrong(name, "a string without surrogates, as UTF-8 has none", value)


def check_name(name: str, value: object) -> None:
    """Raise UsageError unless an argument can be the name of a worker."""
    check_text(name, value, at_most=NAME_CHARACTERS_MAX)
    if not is_name(str(value)):
        raise wrong(name, "a string of printable characters", value)


def set_mark(name: str, function: Any, attribute: str, value: object) -> None:
    """Set an attribute of the function or class that a decorator is given.

    Of a staticmethod or a classmethod, the wrapped function is marked.
    """
    inner = unwrapped(function)
    check_callable(name, inner)
    try:
        setattr(inner, attribute, value)
    except Exception as error:
        wanted = (
            "a function or class that accepts attributes; list a builtin in"
            " Options.allow instead"
        )
        raise wrong(name, wanted, function) from error


def unwrapped(function: Any) -> Any:
    """Return the function in a staticmethod or classmethod; any other, itself."""
    is_wrapped = isinstance(function, staticmethod | classmethod)
    return function.__func__ if is_wrapped else function


SIZE_MAX: Final = (1 << 63) - 1  # of a tensor


def sizes_of(shape: tuple[Any, ...]) -> list[int]:
    """Return the sizes of a shape, given as integers or as one sequence of integers."""
    is_nested = len(shape) == 1 and isinstance(shape[0], tuple | list)
    sizes = list(shape[0] if is_nested else shape)
    for size in sizes:
        check_count("each size in shape", size, at_most=SIZE_MAX)
    return sizes


def check_texts(name: str, value: Any, *, at_least: int = 0) -> None:
    """Raise UsageError unless an argument is a list or tuple of non-empty strings."""
    is_several = isinstance(value, list | tuple) and len(value) >= at_least
    if not is_several or not all(isinstance(text, str) and text for text in value):
        raise wrong(name, "a list of non-empty strings", value)


def check_callable(name: str, value: object) -> None:
    """Raise UsageError unless an argument can be called."""
    if not callable(value):
        raise wrong(name, "callable", value)


def _names_bool(kinds: type | tuple[type, ...]) -> bool:
    return bool in kinds if isinstance(kinds, tuple) else kinds in (bool, object)


def check_call_timeout(name: str, value: Any) -> None:
    """Raise UsageError unless an argument is a time in seconds, None or `UNSET`."""
    if value is not UNSET and value is not None:
        check_seconds(name, value, at_least=0)
