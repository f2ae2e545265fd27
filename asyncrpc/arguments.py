"""What a user gives: checked where it is given, and named in the error.

A wrong argument is the program's fault, so each check raises `UsageError`, whose text
names the argument, says what it must be, and shows what it was.  To show a value runs
its own `__repr__`, which may raise, or be endless: `shown` never raises, and is short.
"""

from __future__ import annotations

from numbers import Real
from typing import Any, Final

from asyncrpc.errors import UsageError

_SHOWN_CHARACTERS: Final = 60


def shown(value: object) -> str:
    """Return a value as an error shows it, cut to 60 characters, with its type."""
    kind = type(value).__qualname__[:_SHOWN_CHARACTERS]
    if value is None or isinstance(value, bool):
        return repr(value)
    try:
        text = repr(value)
    except Exception as problem:  # noqa: BLE001  (the value's own code)
        return f"a {kind} (its repr raised {type(problem).__name__})"
    if len(text) > _SHOWN_CHARACTERS:
        text = f"{text[:_SHOWN_CHARACTERS]}..."
    return f"{text} of type {kind}"


def wrong(name: str, wanted: str, value: object) -> UsageError:
    """Return the error about an argument that is something else than it must be."""
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


def check_seconds(name: str, value: Any) -> None:
    """Raise UsageError unless an argument is a number of seconds."""
    if isinstance(value, bool) or not isinstance(value, Real) or value != value:  # noqa: PLR0124  (NaN)
        raise wrong(name, "a number of seconds, or None for no limit", value)


def check_count(name: str, value: Any, *, at_least: int = 0) -> None:
    """Raise UsageError unless an argument is an integer that is large enough."""
    if type(value) is not int or value < at_least:
        raise wrong(name, f"an integer of at least {at_least}", value)


def check_text(name: str, value: object) -> None:
    """Raise UsageError unless an argument is a non-empty string."""
    if not isinstance(value, str) or not value:
        raise wrong(name, "a non-empty string", value)


def check_callable(name: str, value: object) -> None:
    """Raise UsageError unless an argument can be called."""
    if not callable(value):
        raise wrong(name, "callable", value)


def _names_bool(kinds: type | tuple[type, ...]) -> bool:
    return bool in kinds if isinstance(kinds, tuple) else kinds in (bool, object)
