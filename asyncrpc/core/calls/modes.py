"""The target of a call, and where it runs: decided once per function.

coroutine function        a task on the event loop; of one step if it has no `await`
plain function            a thread of the pool
marked `on_loop`          at once, on the event loop
marked `async_execution`  a thread; what it returns is awaited
(asynchronous) generator  see `streams`
"""

from __future__ import annotations

import dis
import enum
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from asyncrpc.core.arguments import set_mark, unwrapped

F = TypeVar("F", bound=Callable[..., Any])

MODE_ATTRIBUTE: Final = "__asyncrpc_mode__"


class Mode(enum.Enum):
    """Where a function runs."""

    COROUTINE = "a task on the loop"
    ONE_STEP = "a task on the loop, which has nothing to wait for"
    THREAD = "a thread"
    ON_LOOP = "at once, on the loop"
    ASYNC_EXECUTION = "a thread, then its future is awaited"
    ASYNC_GENERATOR = "a stream, on the loop"
    GENERATOR = "a stream, in threads"


def _no_name(_: str | None) -> None:
    """Look up the name of a target that has none."""


@dataclass(slots=True, eq=False)  # a frozen one takes twice as long to make
class Target:
    """The target of a call.

    Attributes:
        name: of the function, without its module.
        is_listed: whether it is among the cheap ones; see `inline`.
        path: its name, by which a peer called it; empty: it arrived as a value.
        look_up: finds a name in its module.
        first: the first part of its name there.
        root: what that was when the function was found.  If it is another object now,
            the module has been reloaded, or the function defined anew.
        cached_in: as of `serde.by_value.ReceivedCode`; None: it is not by value.
    """

    name: str
    function: Callable[..., Any]
    mode: Mode
    is_listed: bool = False
    path: str = ""
    look_up: Callable[[Any], object] = _no_name
    first: str | None = None
    root: object = None
    cached_in: list[tuple[dict[bytes, Any], bytes]] | None = None

    @property
    def is_current(self) -> bool:
        """Return whether its name still leads to it."""
        return self.look_up(self.first) is self.root


# A member of an enum takes 0.1 us to find.
ASYNC_GENERATOR: Final = Mode.ASYNC_GENERATOR
GENERATOR: Final = Mode.GENERATOR


def mode_of(function: Callable[..., Any]) -> Mode:
    """Decide where a function runs."""
    marked = getattr(function, MODE_ATTRIBUTE, None)
    if marked is not None and not inspect.isclass(function):
        return Mode(marked)
    inner = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    if not inspect.isroutine(inner) and not inspect.isclass(inner):
        inner = getattr(inner, "__call__", inner)  # noqa: B004  (an object that is called)
    if inspect.iscoroutinefunction(inner):
        return Mode.ONE_STEP if _has_one_step(inner) else Mode.COROUTINE
    if inspect.isasyncgenfunction(inner):
        return Mode.ASYNC_GENERATOR
    return Mode.GENERATOR if inspect.isgeneratorfunction(inner) else Mode.THREAD


def _has_one_step(function: Any) -> bool:
    """Return whether a coroutine function has neither `await` nor its like."""
    code = getattr(function, "__code__", None)
    if code is None or not code.co_flags & inspect.CO_COROUTINE:
        return False  # a plain function that returns a coroutine, and says so
    return all(step.opname != "SEND" for step in dis.get_instructions(code))


def on_loop(function: F) -> F:
    """Mark a plain function to run on the callee's event loop itself.

    For functions of a few microseconds that never wait: they save the way to a thread
    and back.  While one runs, the worker does nothing else.

    Example:
        >>> @asyncrpc.on_loop
        ... def version() -> int:
        ...     return 3
    """
    set_mark("function", function, MODE_ATTRIBUTE, Mode.ON_LOOP)
    return function


def async_execution(function: F) -> F:
    """Mark a function whose returned future is the result of the call.

    The thread that ran the function is free while the future is pending: so a function
    may wait for other calls, of this caller or of others, without holding a thread.
    The future is one of asyncrpc, asyncio, concurrent.futures or torch.futures.  The
    mark changes nothing for a coroutine function.

    Use it under `@staticmethod` and `@classmethod`:
    `@classmethod` above, `@async_execution` below.

    Raises:
        UsageError: `function` is not a function, or is a builtin.
        RemoteError: at the caller, when the function returns no future.

    Source: torch.distributed.rpc.functions.async_execution.
    """
    inner = unwrapped(function)
    if not inspect.isfunction(inner) or not inspect.iscoroutinefunction(inner):
        set_mark("function", function, MODE_ATTRIBUTE, Mode.ASYNC_EXECUTION)
    return function
