"""The name of an object in a program: a variable of the frame that waits for it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import FrameType
from typing import Any


def locals_of(frame: FrameType) -> dict[str, Any]:
    """Return the variables of a frame without leaving a copy of them in the frame.

    Before Python 3.13 a function's frame keeps the dictionary of `f_locals`: objects
    that the function has dropped since would live until it ends.  A traced frame writes
    this dictionary back, so its dictionary is left as it is.
    """
    kept = frame.f_locals
    variables = dict(kept)
    is_copy = frame.f_code.co_flags & inspect.CO_OPTIMIZED and type(kept) is dict
    if is_copy and frame.f_trace is None:
        kept.clear()
    return variables


def local(frame: FrameType, name: str) -> Any:
    """Return one variable of a frame; None if it does not exist."""
    return locals_of(frame).get(name)


def name_in(frame: FrameType, wanted: object) -> str:
    """Return the name of an object in a function; empty if it has none.

    A variable comes first, then an attribute of one, then a global variable.
    """
    variables = locals_of(frame)
    if key := _key_of(variables, wanted):
        return key
    for name, value in variables.items():
        attributes = getattr(value, "__dict__", None)
        if type(attributes) is dict and (key := _key_of(attributes, wanted)):
            return key if name == "self" else f"{name}.{key}"
        if type(value) is dict and (key := _item_of(value, wanted)):
            return f"{name}[{key}]"
    return _key_of(frame.f_globals, wanted)


def _key_of(mapping: Mapping[str, Any], wanted: object) -> str:
    for name, value in tuple(mapping.items()):
        if value is wanted and isinstance(name, str):
            return name
    return ""


def _item_of(mapping: dict[Any, Any], wanted: object) -> str:
    for key, value in tuple(mapping.items())[:1000]:
        if value is wanted and isinstance(key, (str, int)):
            return repr(key)
    return ""
