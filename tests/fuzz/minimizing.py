"""The fewest inputs, and the shortest, that reach all that a set of inputs reaches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final, TypeAlias

import asyncrpc

# From which line to which line of which file.
Arc: TypeAlias = tuple[str, int, int]
_PACKAGE: Final = Path(asyncrpc.__file__).parent
_PARTS: Final = ("core", "parallel", "serving", "tools")
_TRACED: Final = tuple(str(_PACKAGE / part) for part in _PARTS)


def arcs_of(action: Callable[[], object]) -> set[Arc]:
    """Run an action; return the steps from line to line that it takes."""
    arcs: set[Arc] = set()

    def on_call(frame: FrameType, _event: str, _arg: Any) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(_TRACED):
            return None
        last = 0

        def on_line(frame: FrameType, _event: str, _arg: Any) -> Any:
            nonlocal last
            arcs.add((name, last, frame.f_lineno))
            last = frame.f_lineno
            return on_line

        return on_line

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        with suppress(AssertionError):  # it is kept, and fails where it is replayed
            action()
    finally:
        sys.settrace(before)
    return arcs


def minimized(check: Callable[[bytes], None], inputs: Iterable[bytes]) -> list[bytes]:
    """Return those inputs that reach something which no shorter one does."""
    kept: list[bytes] = []
    reached: set[Arc] = set()
    for data in sorted(set(inputs), key=lambda data: (len(data), data)):
        arcs = arcs_of(partial(check, data))
        if not arcs <= reached:
            reached |= arcs
            kept.append(data)
    return kept
