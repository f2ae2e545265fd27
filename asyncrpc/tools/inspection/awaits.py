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
    one: Any = task.get_coro()
    while one is not None and len(steps) < DEPTH_MAX:
        step = _step_of(one)
        if step is not None:
            steps.append(step)
            one = _awaited_by(one)
        else:
            inner = _inside(one)
            if inner is None:
                break
            one = inner
    waiter = getattr(task, "_fut_waiter", None)
    return Chain(tuple(steps), waiter)


def _step_of(one: Any) -> AwaitStep | None:
    """Return a coroutine or generator as a step; None if it has no frame."""
    if isinstance(one, CoroutineType):
        frame, code = one.cr_frame, one.cr_code
    elif isinstance(one, GeneratorType):
        frame, code = one.gi_frame, one.gi_code
    elif isinstance(one, AsyncGeneratorType):
        frame, code = one.ag_frame, one.ag_code
    else:
        return None
    return None if frame is None else AwaitStep(one, code, frame)


def _awaited_by(one: Any) -> Any:
    if isinstance(one, CoroutineType):
        return one.cr_await
    if isinstance(one, GeneratorType):
        return one.gi_yieldfrom or driven_by(one)
    return one.ag_await


def _inside(one: Any) -> Any:
    """Return the coroutine or generator that an awaitable of the interpreter steps."""
    if isinstance(one, asyncio.Future) or type(one).__name__ == "FutureIter":
        return None
    for inner in gc.get_referents(one):
        if isinstance(inner, _SUSPENDABLE):
            return inner
    return None


def entered(step: AwaitStep) -> Iterator[Any]:
    """Yield the context managers that a suspended coroutine has entered.

    Inside of `with` or `async with`, the bound exit method lies on the stack of the
    frame.  The generators of `contextlib` managers are searched as well.
    """
    for one in gc.get_referents(step.suspended):
        if type(one) is MethodType and one.__name__ in ("__aexit__", "__exit__"):
            manager = one.__self__
            yield manager
            generator = getattr(manager, "gen", None)
            inner = _step_of(generator)
            if inner is not None and inner.frame is not step.frame:
                yield from entered(inner)


def objects_in(step: AwaitStep) -> Iterator[Any]:
    """Yield what a suspended coroutine refers to, and the attributes of its `self`."""
    for one in gc.get_referents(step.suspended):
        yield one
        attributes = getattr(one, "__dict__", None)
        if type(attributes) is dict and not inspect.ismodule(one):
            yield from tuple(attributes.values())
