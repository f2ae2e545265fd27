"""The chain of awaits of a task: which coroutine waits for which, down to a future.

It is read from the objects themselves, from any thread and without help from the
program: nothing is recorded while the program runs.

Source: the attributes `cr_await`, `gi_yieldfrom` and `ag_await` of CPython, and what
`gc.get_referents` says of objects that have none, such as the step of an asynchronous
generator.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
from collections.abc import Iterator
from types import (
    AsyncGeneratorType,
    CodeType,
    CoroutineType,
    FrameType,
    GeneratorType,
    MethodType,
)
from typing import Any, Final, NamedTuple

from asyncrpc.core.torch_modes import driven_by

DEPTH_MAX: Final = 200  # of a chain; deeper steps are not followed

_SUSPENDABLE: Final = (CoroutineType, GeneratorType, AsyncGeneratorType)


class AwaitStep(NamedTuple):
    """One coroutine or generator of a chain.

    Attributes:
        suspended: the coroutine or generator.
    """

    suspended: Any
    code: CodeType
    frame: FrameType


class Chain(NamedTuple):
    """The chain of awaits of one task.

    Attributes:
        steps: the outermost first.
        awaited: what the innermost waits for; None if the task runs or is about to.
    """

    steps: tuple[AwaitStep, ...]
    awaited: Any


def chain_of(task: asyncio.Task[Any]) -> Chain:
    """Return the chain of a task that has not ended."""
    steps: list[AwaitStep] = []
    awaited: Any = task.get_coro()
    while awaited is not None and len(steps) < DEPTH_MAX:
        step = _step_of(awaited)
        if step is not None:
            steps.append(step)
            awaited = _awaited_by(awaited)
        else:
            inner = _inside(awaited)
            if inner is None:
                break
            awaited = inner
    waiter = getattr(task, "_fut_waiter", None)
    return Chain(tuple(steps), waiter)


def _step_of(suspended: Any) -> AwaitStep | None:
    """Return a coroutine or generator as a step; None if it has no frame."""
    if isinstance(suspended, CoroutineType):
        frame, code = suspended.cr_frame, suspended.cr_code
    elif isinstance(suspended, GeneratorType):
        frame, code = suspended.gi_frame, suspended.gi_code
    elif isinstance(suspended, AsyncGeneratorType):
        frame, code = suspended.ag_frame, suspended.ag_code
    else:
        return None
    return None if frame is None else AwaitStep(suspended, code, frame)


def _awaited_by(suspended: Any) -> Any:
    if isinstance(suspended, CoroutineType):
        return suspended.cr_await
    if isinstance(suspended, GeneratorType):
        return suspended.gi_yieldfrom or driven_by(suspended)
    return suspended.ag_await


def _inside(awaitable: Any) -> Any:
    """Return the coroutine or generator that an awaitable of the interpreter steps."""
    if (
        isinstance(awaitable, asyncio.Future)
        or type(awaitable).__name__ == "FutureIter"
    ):
        return None
    for inner in gc.get_referents(awaitable):
        if isinstance(inner, _SUSPENDABLE):
            return inner
    return None


def entered(step: AwaitStep) -> Iterator[Any]:
    """Yield the context managers that a suspended coroutine has entered.

    Inside of `with` or `async with`, the bound exit method lies on the stack of the
    frame.  The generators of `contextlib` managers are searched as well.
    """
    for referent in gc.get_referents(step.suspended):
        if type(referent) is MethodType and referent.__name__ in (
            "__aexit__",
            "__exit__",
        ):
            manager = referent.__self__
            yield manager
            generator = getattr(manager, "gen", None)
            inner = _step_of(generator)
            if inner is not None and inner.frame is not step.frame:
                yield from entered(inner)


def objects_in(step: AwaitStep) -> Iterator[Any]:
    """Yield what a suspended coroutine refers to, and the attributes of its `self`."""
    for referent in gc.get_referents(step.suspended):
        yield referent
        attributes = getattr(referent, "__dict__", None)
        if type(attributes) is dict and not inspect.ismodule(referent):
            yield from tuple(attributes.values())
