"""What a task waits for, judged by the code that waits and the future that it awaits.

Recognized are the primitives of asyncio and calls; functions of asyncrpc declare what
they wait for, see `core.loop.waits`.  The program's function that uses one of them is
shown with it; the inside of a library is not: a task in `Queue.join` waits for a queue,
not for the event inside of the queue.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, Final, TypeAlias

from asyncrpc.core.calls.futures import CallFuture
from asyncrpc.core.loop.waits import declaration_of
from asyncrpc.extend import WaitDescription, WaitKind
from asyncrpc.tools.inspection.awaits import AwaitStep, Chain, entered
from asyncrpc.tools.inspection.names import local, locals_of, name_in

# Takes the step of a function of asyncio that waits, and the step that called it.
Recognize: TypeAlias = Callable[[AwaitStep, AwaitStep | None], WaitDescription]

_STANDARD: Final = str(Path(asyncio.__file__).parents[1])  # Python's own library
_INSTALLED: Final = ("site-packages", "dist-packages")  # lie inside of it
_ASYNCRPC: Final = str(Path(__file__).parents[2])


def is_of_library(code: CodeType) -> bool:
    """Return whether code belongs to asyncrpc or to Python's own library."""
    if code.co_filename.startswith(_STANDARD):
        rest = code.co_filename.removeprefix(_STANDARD).strip("/")
        return not rest.startswith(_INSTALLED)
    return code.co_filename.startswith(_ASYNCRPC)


def recognized(chain: Chain) -> WaitDescription:
    """Return what the task of a chain waits for."""
    if chain.awaited is None:
        return WaitDescription(WaitKind.RUNS)
    if isinstance(chain.awaited, CallFuture):
        return WaitDescription(WaitKind.CALL, call=chain.awaited)
    wait: WaitDescription | None = None
    for place in range(len(chain.steps) - 1, -1, -1):
        step = chain.steps[place]
        declaration = declaration_of(step.code)
        if declaration is not None and declaration.waits is not None:
            wait = declaration.waits(locals_of(step.frame)) or wait
        elif not is_of_library(step.code):
            break
        elif (recognize := _BY_CODE.get(step.code)) is not None:
            user = chain.steps[place - 1] if place else None
            wait = recognize(step, user)
    return wait or _future(chain.awaited)


def labels_of(steps: Sequence[AwaitStep]) -> Iterator[str]:
    """Yield what a task does for others, as labels: `records.ObservedActor.does`."""
    for step in steps:
        declaration = declaration_of(step.code)
        if declaration is not None and declaration.does is not None:
            yield declaration.does(locals_of(step.frame))
        for manager in entered(step):
            leave = getattr(type(manager), "__aexit__", None)
            declaration = declaration_of(getattr(leave, "__code__", None))
            if declaration is not None and declaration.does is not None:
                yield declaration.does({"self": manager})


def work_of(steps: Sequence[AwaitStep]) -> Iterator[object]:
    """Yield the objects that a task works for, and for which others wait."""
    for step in steps:
        declaration = declaration_of(step.code)
        if declaration is not None and declaration.work is not None:
            yield declaration.work(locals_of(step.frame))


# --- asyncio -------------------------------------------------------------------------


def _named(kind: WaitKind, shown: str) -> Recognize:
    """Return a recognizer of a primitive, named by a variable of its user."""

    def recognize(step: AwaitStep, user: AwaitStep | None) -> WaitDescription:
        subject = local(step.frame, "self")
        name = ""
        if user is not None and subject is not None:
            name = name_in(user.frame, subject)
        return WaitDescription(kind, _called(shown, name), subject)

    return recognize


def _entering(step: AwaitStep, user: AwaitStep | None) -> WaitDescription:
    """Recognize the primitive that a task waits to enter by `async with`."""
    subject = local(step.frame, "self")
    kind, shown = WaitKind.LOCK, type(subject).__name__
    if isinstance(subject, asyncio.Semaphore):
        kind = WaitKind.SEMAPHORE
    name = "" if user is None else name_in(user.frame, subject)
    return WaitDescription(kind, _called(shown, name), subject)


def _called(shown: str, name: str) -> str:
    """Return the words for a primitive, with its name if it has one."""
    if name:
        return f"{shown} `{name}`"
    if shown[0].islower():  # "an item of Queue"
        return shown
    return f"an {shown}" if shown[0] in "AEIOU" else f"a {shown}"


def _joined(step: AwaitStep, _: AwaitStep | None) -> WaitDescription:
    """Recognize the tasks that a `TaskGroup` waits for at its end."""
    group = local(step.frame, "self")
    return _tasks(getattr(group, "_tasks", ()))


def _all_of(name: str) -> Recognize:
    """Return a recognizer of the tasks in a variable of a function of asyncio."""

    def recognize(step: AwaitStep, _: AwaitStep | None) -> WaitDescription:
        awaited = local(step.frame, name)
        is_one = isinstance(awaited, asyncio.Future)
        return _future(awaited) if is_one else _tasks(tuple(awaited or ()))

    return recognize


def _tasks(futures: Iterable[Any]) -> WaitDescription:
    open_ = [
        future for future in tuple(futures) if future is not None and not future.done()
    ]
    tasks = tuple(future for future in open_ if isinstance(future, asyncio.Task))
    calls = tuple(future for future in open_ if isinstance(future, CallFuture))
    if not tasks and len(calls) == 1:
        return WaitDescription(WaitKind.CALL, call=calls[0])
    noun = "task" if tasks else "call"
    description = f"{len(open_)} {noun}s" if len(open_) != 1 else f"a {noun}"
    return WaitDescription(WaitKind.TASKS, description, tasks=tasks, calls=calls)


def _sleep(step: AwaitStep, _: AwaitStep | None) -> WaitDescription:
    delay = local(step.frame, "delay")
    return WaitDescription(WaitKind.SLEEP, f"sleep({delay})")


def _future(awaited: Any) -> WaitDescription:
    """Recognize a future by its type, and by its callbacks."""
    if isinstance(awaited, asyncio.Task):
        return _tasks((awaited,))
    children = getattr(awaited, "_children", None)
    if isinstance(children, list):
        return _tasks(children)
    innermost = awaited
    for behind in _behind(awaited):
        if isinstance(behind, CallFuture):
            return WaitDescription(WaitKind.CALL, call=behind)
        if isinstance(behind, asyncio.Task):
            return _tasks((behind,))
        if isinstance(behind, concurrent.futures.Future):
            return WaitDescription(WaitKind.THREADS, "a thread", behind)
        innermost = behind
    return WaitDescription(WaitKind.FUTURE, "a future", innermost)


def _behind(future: Any) -> Iterable[Any]:
    """Yield the futures that the callbacks of another one refer to.

    In this way `asyncio.shield` and `asyncio.wrap_future` tie one future to another.
    """
    for callback, _context in tuple(getattr(future, "_callbacks", None) or ()):
        if not isinstance(callback, FunctionType):
            continue
        for cell in callback.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:  # the cell is empty
                continue
            if content is future:
                continue
            if isinstance(content, (asyncio.Future, concurrent.futures.Future)):
                yield content


# --- by code -------------------------------------------------------------------------


_BY_CODE: Final[Mapping[CodeType, Recognize]] = {
    asyncio.Lock.acquire.__code__: _named(WaitKind.LOCK, "Lock"),
    asyncio.Lock.__aenter__.__code__: _entering,
    asyncio.Semaphore.acquire.__code__: _named(WaitKind.SEMAPHORE, "Semaphore"),
    asyncio.Condition.wait.__code__: _named(WaitKind.CONDITION, "Condition"),
    asyncio.Condition.wait_for.__code__: _named(WaitKind.CONDITION, "Condition"),
    asyncio.Event.wait.__code__: _named(WaitKind.EVENT, "Event"),
    asyncio.Queue.get.__code__: _named(WaitKind.ITEM, "an item of Queue"),
    asyncio.Queue.put.__code__: _named(WaitKind.ROOM, "room in Queue"),
    asyncio.Queue.join.__code__: _named(WaitKind.WORK, "all work of Queue"),
    asyncio.Barrier.wait.__code__: _named(WaitKind.BARRIER, "Barrier"),
    asyncio.TaskGroup.__aexit__.__code__: _joined,
    asyncio.wait.__code__: _all_of("fs"),
    asyncio.wait_for.__code__: _all_of("fut"),
    asyncio.sleep.__code__: _sleep,
}
