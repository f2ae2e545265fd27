"""One call of an actor at a time: the mark, and what keeps to it where the actor is.

For an actor with exclusive methods its worker holds an object of a class that is made
for it: with the same public methods, whose calls wait for their turn.  A method that
calls others by `self` has its turn, and calls them as usual.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from typing import Any, Final, TypeVar

from asyncrpc import current_worker, expose
from asyncrpc.core.arguments import set_mark
from asyncrpc.core.torch_modes import modes_here, surrounded
from asyncrpc.errors import Outcome, OverloadedError, UsageError
from asyncrpc.extend import host_of

_MARK: Final = "__asyncrpc_exclusive__"
_EXPOSED: Final = "__asyncrpc_exposed__"  # what `asyncrpc.expose` sets
# Calls of one actor that wait for their turn: each holds its arguments.
WAITING_MAX: Final = 1024
RETRY_AFTER_S: Final = 1.0

F = TypeVar("F", bound=Callable[..., Any])


def exclusive(class_or_method: F) -> F:
    """Let an actor run one call at a time, in the order in which calls arrive.

    Of a class, this holds for all its public methods; of methods, for those that are
    marked, among each other.  A subclass inherits it.  It holds for calls from workers
    and for `save` and `load`, not for calls within the object.  A stream is a call
    until its end.  At most 1024 calls of an actor wait; a further one is refused.

    An exclusive actor that awaits a call of itself waits for its own end.

    Args:
        class_or_method: a class, or a method of one.

    Returns:
        The same object.

    Raises:
        UsageError: `class_or_method` accepts no attributes, or is not callable.

    Example:
        >>> @asyncrpc.exclusive
        ... class Counter:
        ...     async def add(self, n: int) -> int: ...
    """
    set_mark("class_or_method", class_or_method, _MARK, True)  # noqa: FBT003  (a mark)
    return class_or_method


def methods_of(cls: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the methods of a class that actors offer, by name."""
    for name in dir(cls):
        if name == "__call__" or not name.startswith("_"):
            method = getattr(cls, name, None)
            if inspect.isroutine(method):
                yield name, method


class _CallTurns:
    """Whose call may run."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._waiting = 0

    async def __aenter__(self) -> None:
        """Wait for a turn; a cancelled call leaves the queue."""
        if self._waiting >= WAITING_MAX:
            raise OverloadedError(
                f"{WAITING_MAX} calls of this exclusive actor wait already",
                retry_after_s=RETRY_AFTER_S,
                outcome=Outcome.NOT_EXECUTED,
            )
        self._waiting += 1
        try:
            await self._lock.acquire()
        finally:
            self._waiting -= 1

    async def __aexit__(self, *_error: object) -> None:
        self.end()

    def end(self, _running: object = None) -> None:
        """End the turn."""
        self._lock.release()


class TurnTaker:
    """Stands for an actor with exclusive methods; its subclass has them."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._turns = _CallTurns()


def with_turns(actor: object) -> object:
    """Return what a worker holds for an actor: the actor, or what keeps its turns."""
    cls = type(actor)
    methods = dict(methods_of(cls))
    marked = methods
    if not getattr(cls, _MARK, False):
        marked = {
            name: method
            for name, method in methods.items()
            if getattr(method, _MARK, False)
        }
    if not marked:
        return actor
    forwarded = {
        name: (_in_turn if name in marked else _at_once)(name, method)
        for name, method in methods.items()
    }
    kind = type(cls.__name__, (TurnTaker,), forwarded)
    kind.__module__, kind.__qualname__ = cls.__module__, cls.__qualname__
    if _EXPOSED in vars(cls):
        expose(kind)
    return kind(actor)


def actor_of(value: Any) -> Any:
    """Return the actor that a worker holds."""
    return value._actor if isinstance(value, TurnTaker) else value  # noqa: SLF001


def turn_of(value: Any) -> AbstractAsyncContextManager[None]:
    """Return a context in which no exclusive call of an actor runs."""
    if isinstance(value, TurnTaker):
        return value._turns  # noqa: SLF001
    return nullcontext()


def _at_once(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of the same kind that calls one of the actor."""
    if inspect.isasyncgenfunction(method):

        async def items(self: TurnTaker, *args: Any, **kwargs: Any) -> Any:
            async with aclosing(getattr(self._actor, name)(*args, **kwargs)) as source:
                async for item in source:
                    yield item

        return functools.wraps(method)(items)
    if inspect.isgeneratorfunction(method):

        def steps(self: TurnTaker, *args: Any, **kwargs: Any) -> Any:
            return (yield from getattr(self._actor, name)(*args, **kwargs))

        return functools.wraps(method)(steps)
    if inspect.iscoroutinefunction(method):

        async def run(self: TurnTaker, *args: Any, **kwargs: Any) -> Any:
            return await getattr(self._actor, name)(*args, **kwargs)

        return functools.wraps(method)(run)

    def call(self: TurnTaker, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._actor, name)(*args, **kwargs)

    return functools.wraps(method)(call)  # with its marks, which say where it runs


def _in_turn(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a coroutine or generator method that calls one of the actor in its turn.

    Without the marks of the method, which say where a plain function runs.
    """
    run: Any
    if inspect.isasyncgenfunction(method):

        async def run(self: TurnTaker, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            async with self._turns:
                source = getattr(self._actor, name)(*args, **kwargs)
                async with aclosing(source):
                    async for item in source:
                        yield item

    elif inspect.isgeneratorfunction(method):
        raise UsageError(
            f"{method.__qualname__} is a plain generator, which has no turns; make it"
            " an asynchronous one (`async def`), or mark other methods as exclusive"
        )
    elif inspect.iscoroutinefunction(method):

        async def run(self: TurnTaker, *args: Any, **kwargs: Any) -> Any:
            async with self._turns:
                return await getattr(self._actor, name)(*args, **kwargs)

    else:

        async def run(self: TurnTaker, *args: Any, **kwargs: Any) -> Any:
            call = functools.partial(getattr(self._actor, name), *args, **kwargs)
            await self._turns.__aenter__()
            return await _in_thread(call, self._turns.end)

    return functools.wraps(method, updated=())(run)


async def _in_thread(call: Callable[[], Any], on_end: Callable[[object], None]) -> Any:
    """Run a plain method in a thread, in this call's context and torch modes.

    A cancelled call ends at once; its turn lasts until the thread has ended.
    """
    context = contextvars.copy_context()
    job = functools.partial(context.run, surrounded(call, modes_here()))
    try:
        running = host_of(current_worker()).pool.run(job)
    except BaseException:
        on_end(None)
        raise
    running.add_done_callback(on_end)
    return await asyncio.shield(running)
