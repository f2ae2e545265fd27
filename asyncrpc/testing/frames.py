"""The frames of a suspended task: all of them, not only the first.

`asyncio.Task.get_stack` of a waiting task ends at its outermost coroutine.  Here the
chain of awaits is followed to its end.
"""

from __future__ import annotations

import asyncio
import gc
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import asyncrpc
from asyncrpc.core.torch_modes import driven_by

_PACKAGE: Final = str(Path(asyncrpc.__file__).parent) + "/"
_KIT: Final = _PACKAGE + "testing/"  # belongs to the test, not to the program
_SUSPENDED: Final = (
    types.CoroutineType,
    types.GeneratorType,
    types.AsyncGeneratorType,
)


@dataclass(frozen=True, slots=True)
class SuspendedLine:
    """A line in a suspended function.

    Attributes:
        file: whole path.
        owner: its `self`, if it is a method.
    """

    function: str
    file: str
    line: int
    owner: object

    @property
    def is_ours(self) -> bool:
        """Return whether it is in code of asyncrpc outside of the test kit."""
        return self.file.startswith(_PACKAGE) and not self.file.startswith(_KIT)

    def __str__(self) -> str:
        file = self.file.removeprefix(str(Path(_PACKAGE).parent) + "/")
        return f"{self.function} ({file}:{self.line})"


def places_of(task: asyncio.Task[Any]) -> list[SuspendedLine]:
    """Return where a task waits, the innermost place first."""
    frames = _frames(task.get_coro())
    return [_place(frame) for frame in frames][::-1]


def place_of_callback(callback: Any) -> SuspendedLine | None:
    """Return the code of a callback of a future, if it is Python code."""
    called = getattr(callback, "func", callback)  # of a partial
    function = getattr(called, "__func__", called)
    if not isinstance(function, types.FunctionType):
        return None
    code, owner = function.__code__, getattr(called, "__self__", None)
    return SuspendedLine(code.co_qualname, code.co_filename, code.co_firstlineno, owner)


def _frames(awaited: object) -> Iterator[types.FrameType]:
    while awaited is not None:
        frame, following = _step(awaited)
        if frame is not None:
            yield frame
        awaited = following


def _step(awaited: object) -> tuple[types.FrameType | None, object]:
    """Return the frame of a suspended object, and the object that it awaits."""
    match awaited:
        case types.CoroutineType():
            return awaited.cr_frame, awaited.cr_await
        case types.GeneratorType():
            return awaited.gi_frame, awaited.gi_yieldfrom or driven_by(awaited)
        case types.AsyncGeneratorType():
            return awaited.ag_frame, awaited.ag_await
    # Objects in between do not show what they drive: the step of an asynchronous
    # generator, or the result of a coroutine's `__await__`.
    driven = (
        referent
        for referent in gc.get_referents(awaited)
        if type(referent) in _SUSPENDED
    )
    return None, next(driven, None)


def _place(frame: types.FrameType) -> SuspendedLine:
    code = frame.f_code
    return SuspendedLine(
        code.co_qualname,
        code.co_filename,
        frame.f_lineno or 0,
        frame.f_locals.get("self") if code.co_filename.startswith(_PACKAGE) else None,
    )
