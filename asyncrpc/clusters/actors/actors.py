"""`Actors`: several objects on workers, called together or one as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec, TypeAlias, TypeVar, overload

from asyncrpc.clusters.actors.actor import CALLED, Actor, ActorClass
from asyncrpc.clusters.actors.scatter import split
from asyncrpc.core.arguments import check_kind, check_sequence
from asyncrpc.core.html import TEXT_MAX, State, panel
from asyncrpc.errors import UsageError

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")


@dataclass(frozen=True, slots=True, repr=False)
class ActorReply(Generic[R]):
    """The answer of one of several actors.

    Attributes:
        actor: whose answer it is.
        call: the task that called it, which is done.
    """

    actor: Actor[Any]
    call: asyncio.Task[R]

    @property
    def error(self) -> BaseException | None:
        """Return the error of the call; None if it did not fail."""
        if self.call.cancelled():
            return asyncio.CancelledError()
        return self.call.exception()

    def result(self) -> R:
        """Return the result, or raise what the call failed with."""
        return self.call.result()

    def __repr__(self) -> str:
        word, what = self._outcome
        return f"<ActorReply {word} {what} from {self.actor!r}>"

    def _repr_html_(self) -> str:
        word, what = self._outcome
        cell = what if self.error is None else State(what, "bad")
        return panel("Reply", f"of {self.actor!r}", rows=[(word, cell)])

    @property
    def _outcome(self) -> tuple[str, str]:
        error = self.error
        if error is not None:
            return "raised", f"{error!r:.{TEXT_MAX}}"
        return "returned", f"{self.call.result()!r:.{TEXT_MAX}}"


ActorAndCall: TypeAlias = tuple[Actor[Any], Coroutine[Any, Any, R]]


async def _replies(
    calls: Iterable[ActorAndCall[R]],
) -> AsyncGenerator[ActorReply[R], None]:
    """Run a call of each actor; yield each reply as it comes.

    However it is left, the calls that have not ended are cancelled.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Queue[asyncio.Task[R]] = asyncio.Queue()  # each task comes once
    tasks: dict[asyncio.Task[R], Actor[Any]] = {}
    try:
        for actor, call in calls:
            task = loop.create_task(call)
            tasks[task] = actor
            task.add_done_callback(done.put_nowait)
        for _ in range(len(tasks)):
            task = await done.get()
            yield ActorReply(tasks[task], task)
    finally:
        for task in tasks:
            if not task.cancel() and not task.cancelled():
                task.exception()  # marks it as read


async def _results(
    actors: Sequence[Actor[Any]], calls: Iterable[ActorAndCall[R]]
) -> list[R]:
    """Run a call of each actor; return the results in order, or raise the first error.

    The error has a note that names the actor.
    """
    __tracebackhide__ = True  # notebooks and pytest leave this frame out
    results: dict[Actor[Any], R] = {}
    async with aclosing(_replies(calls)) as replies:
        async for reply in replies:
            try:
                results[reply.actor] = reply.result()
            except Exception as error:
                error.add_note(f"From {reply.actor!r}")
                raise
    return [results[actor] for actor in actors]


class ActorsMethod(Generic[P, R]):
    """A method of several actors; from `Actors.method`, or an attribute of `Actors`."""

    __slots__ = ("_actors", "_name")

    def __init__(self, actors: Sequence[Actor[Any]], name: str) -> None:
        self._actors = actors
        self._name = name

    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call every actor; return the results in order.

        The first error cancels the calls that have not ended.

        Args:
            *args: of the method; the same for each, but for `scatter(...)`.
            **kwargs: likewise.

        Raises:
            UsageError: `scatter` has not one value for each.
            Exception: what the first call that failed has raised, with a note that
                names the actor.

        Cancellation:
            All calls that have not ended are cancelled.
        """
        __tracebackhide__ = True  # here as well
        return await _results(self._actors, self._calls(args, kwargs))

    async def as_completed(
        self, *args: P.args, **kwargs: P.kwargs
    ) -> AsyncGenerator[ActorReply[R], None]:
        """Call every actor; yield each reply as it comes.

        An error is raised by `ActorReply.result()`, so that the loop can go on.  When
        the iteration ends, or is left, the calls that have not ended are cancelled.

        Args:
            *args: as for a call.
            **kwargs: as for a call.

        Raises:
            UsageError: `scatter` has not one value for each.

        Cancellation:
            All calls that have not ended are cancelled.

        Example:
            >>> async for reply in counters.add.as_completed(2):
            ...     print(reply.actor.index, reply.result())
        """
        async with aclosing(_replies(self._calls(args, kwargs))) as replies:
            async for reply in replies:
                yield reply

    def _calls(self, args: Any, kwargs: Any) -> Iterator[ActorAndCall[R]]:
        arguments = split(len(self._actors), args, kwargs)
        for actor, (by_place, by_name) in zip(self._actors, arguments, strict=True):
            yield actor, actor.method(self._name)(*by_place, **by_name)

    def __repr__(self) -> str:
        return f"<method {self._name} of {len(self._actors)} actors>"


class Actors(Generic[T]):
    """Several objects of a class, each on a worker; from `Cluster.spawn`.

    A sequence: `len(actors)`, `actors[0]`, `actors[1:3]`, `for actor in actors`.  An
    attribute is a method of all: `await actors.add(2)` returns a list in order, and
    `actors.add.as_completed(2)` iterates over replies.  `method` gives the same with
    types, and reaches methods that have the name of an attribute below.

    It travels in calls, as references do.  See `Actor` for how long objects live.

    Thread safety:
        Use it on the worker's event loop.
    """

    __slots__ = ("__weakref__", "_actors", "_interface")

    def __init__(self, interface: ActorClass, actors: Sequence[Actor[T]]) -> None:
        """Gather actors of a class; programs call `Cluster.spawn`."""
        self._interface = interface
        self._actors = tuple(actors)

    def __len__(self) -> int:
        return len(self._actors)

    def __iter__(self) -> Iterator[Actor[T]]:
        return iter(self._actors)

    @overload
    def __getitem__(self, at: int) -> Actor[T]: ...
    @overload
    def __getitem__(self, at: slice) -> Actors[T]: ...
    def __getitem__(self, at: int | slice) -> Actor[T] | Actors[T]:
        """Return one actor, or some.

        Raises:
            IndexError: there are not so many.
            UsageError: `at` is neither an integer nor a slice.
        """
        check_kind("at", at, (int, slice), "an index or a slice")
        if isinstance(at, slice):
            return Actors(self._interface, self._actors[at])
        try:
            return self._actors[at]
        except IndexError:
            count = len(self._actors)
            raise IndexError(f"index {at} is out of range of {count} actors") from None

    def __getattr__(self, name: str) -> ActorsMethod[..., Any]:
        return self._bound(name)

    @overload
    def method(
        self, method: Callable[Concatenate[T, P], Awaitable[R]], /
    ) -> ActorsMethod[P, R]: ...
    @overload
    def method(
        self, method: Callable[Concatenate[T, P], R], /
    ) -> ActorsMethod[P, R]: ...
    @overload
    def method(self, method: str, /) -> ActorsMethod[..., Any]: ...
    def method(self, method: str | Callable[..., Any], /) -> ActorsMethod[..., Any]:
        """Return a method of all objects, to be called here.

        Args:
            method: of the class, `Counter.add`, so that type checkers see its
                parameters and its result; or its name.

        Raises:
            AttributeError: the class has no public method of this name.
            UsageError: `method` is not one of the class, or is a generator.

        Example:
            >>> totals = await counters.method(Counter.add)(2)
        """
        return self._bound(self._interface.name_of(method))

    def _bound(self, name: str) -> ActorsMethod[..., Any]:
        kind = self._interface.kind(name)
        if kind is not CALLED:
            raise UsageError(
                f"{name} is {kind}: iterate over that of one actor, such as"
                f" `actors[0].{name}(...)`"
            )
        return ActorsMethod(self._actors, name)

    async def save(self) -> list[Any]:
        """Return a copy of the state of each object, in order; see `Actor.save`.

        Raises:
            OwnerLostError: the worker of an actor is lost.
            CallError: a state cannot be copied or sent, or a call failed.

        Cancellation:
            Nothing changes.
        """
        calls = ((actor, actor.save()) for actor in self._actors)
        return await _results(self._actors, calls)

    async def load(self, states: Sequence[Any]) -> None:
        """Give each object a state; see `Actor.load`.

        Args:
            states: one for each, in order, as `save` returns them.

        Raises:
            UsageError: `states` is not a sequence with one for each.
            OwnerLostError: the worker of an actor is lost.
            CallError: a state cannot be sent or set, or a call failed.

        Cancellation:
            Some may have been set.
        """
        check_sequence("states", states, "a sequence of states")
        if len(states) != len(self._actors):
            raise UsageError(
                f"states must be {len(self._actors)}, one for each actor, not"
                f" {len(states)}"
            )
        pairs = zip(self._actors, states, strict=True)
        calls = ((actor, actor.load(state)) for actor, state in pairs)
        await _results(self._actors, calls)

    def release(self) -> None:
        """Give the references back now, instead of when this is collected.  Idempotent.

        Any later use raises RRefDeletedError.
        """
        for actor in self._actors:
            actor.release()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Travel in a call: the references do."""
        return _gathered, (self._interface.cls, self._actors)

    def __repr__(self) -> str:
        workers = dict.fromkeys(repr(actor.worker) for actor in self._actors)
        what = f"{len(self)} Actors of {self._interface.cls.__name__}"
        return f"<{what} on {', '.join(workers)}>"

    def _repr_html_(self) -> str:
        rows = [(f"{actor.index}", actor.worker) for actor in self._actors]
        title = f"{len(self)} Actors of {self._interface.cls.__name__}"
        return panel(title, columns=("actor", "worker"), rows=rows)


def _gathered(cls: type[T], actors: Sequence[Actor[T]]) -> Actors[T]:
    return Actors(ActorClass(cls), actors)
