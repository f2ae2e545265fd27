"""`Actor` and `Actors`: objects on workers, called by their methods.

    counters = await cluster.spawn(Counter, 1)
    totals = await counters.add(2)  # of each, in order
    total = await counters[0].add(2)

An actor is a value of its worker, and `Actor` holds a reference to it: the actor lives
as long as a worker holds one.  Its methods run as functions do that a peer calls.
"""

from __future__ import annotations

import asyncio
import difflib
import inspect
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
)
from contextlib import aclosing
from functools import partial
from typing import (
    Any,
    Concatenate,
    Final,
    Generic,
    ParamSpec,
    TypeVar,
    overload,
)

from asyncrpc import Peer, RRef, current_worker
from asyncrpc.clusters.actors import owner
from asyncrpc.clusters.actors.exclusive import methods_of
from asyncrpc.clusters.actors.orders import Remaking
from asyncrpc.core.arguments import wrong
from asyncrpc.core.html import panel
from asyncrpc.core.worker import Worker
from asyncrpc.errors import (
    AsyncRpcError,
    CallError,
    EncodeError,
    Outcome,
    OwnerLostError,
    RemoteError,
    UnknownWorkerError,
    WorkerLostError,
)

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")

CALLED: Final = "called"
_STREAMED: Final = "an asynchronous generator"
_STEPPED: Final = "a plain generator"


class ActorClass:
    """What actors of a class offer: its methods, as far as they have been used."""

    def __init__(self, cls: type) -> None:
        self.cls = cls
        self._kinds: dict[str, str] = {}

    def kind(self, name: str) -> str:
        """Return how a method is used; raise AttributeError if there is none."""
        kind = self._kinds.get(name)
        if kind is None:
            kind = self._kinds[name] = self._look_up(name)
        return kind

    def _look_up(self, name: str) -> str:
        cls = self.cls
        method = getattr(cls, name, None)
        is_private = name.startswith("_") and name != "__call__"
        is_dynamic = method is None and hasattr(cls, "__getattr__")
        if is_private or not (inspect.isroutine(method) or is_dynamic):
            raise self._no_method(name, is_private=is_private)
        if inspect.isasyncgenfunction(method):
            return _STREAMED
        return _STEPPED if inspect.isgeneratorfunction(method) else CALLED

    def _no_method(self, name: str, *, is_private: bool) -> AttributeError:
        kind = self.cls.__qualname__
        if is_private:
            return AttributeError(
                f"{kind}.{name} is private; actors have public methods"
            )
        if hasattr(self.cls, name):
            return AttributeError(
                f"{kind}.{name} is not a method; add one that returns its value"
            )
        known = [name for name, _ in methods_of(self.cls)]
        near = difflib.get_close_matches(name, known, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return AttributeError(f"{kind} has no method {name!r}{hint}")

    def name_of(self, method: str | Callable[..., Any]) -> str:
        """Return the name of a method that is given by itself or by name."""
        if isinstance(method, str):
            self.kind(method)
            return method
        name = getattr(method, "__name__", None)
        homes = self.cls.__mro__
        if not isinstance(name, str) or not any(
            getattr(home, name, None) == method for home in homes
        ):
            raise wrong("method", f"a method of {self.cls.__qualname__}", method)
        self.kind(name)
        return name


class Actor(Generic[T]):
    """One object on a worker; from `Cluster.spawn`, by `actors[0]`.

    An attribute is a method of the object: `await actor.add(2)`, or, if it is a
    generator, `async for row in actor.rows()`.  `method` gives the same with types, and
    reaches methods that have the name of an attribute below.

    It travels in calls, as a reference does.  The object lives until no worker holds an
    `Actor` of it; nothing is called at its end.

    Thread safety:
        Use it on the worker's event loop.

    Attributes:
        index: among those that were made with it.
        worker: name of the worker that has the object.
    """

    __slots__ = (
        "__weakref__",
        "_here",
        "_interface",
        "_one_remakes",
        "_proxy",
        "_remaking",
        "_rref",
        "index",
        "worker",
    )

    def __init__(
        self,
        here: Worker | None,
        interface: ActorClass,
        index: int,
        rref: RRef[T],
        remaking: Remaking | None = None,
    ) -> None:
        """Refer to an object that has been made; programs call `Cluster.spawn`."""
        self._here = here
        self._interface = interface
        self.index = index
        self.worker = rref.owner_name()
        self._remaking = remaking
        self._one_remakes = asyncio.Lock()
        self._hold(rref)

    def _hold(self, rref: RRef[T]) -> None:
        self._rref = rref
        self._proxy = rref.rpc_async()

    def _peer(self) -> Peer:
        # What has come in a call belongs to the worker that uses it.
        return (self._here or current_worker()).peer(self.worker)

    @property
    def rref(self) -> RRef[T]:
        """The reference to the object; another one once it has been made again."""
        return self._rref

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return self._bound(name)

    # Of overlapping signatures the first one that fits counts.
    @overload
    def method(  # type: ignore[overload-overlap]
        self, method: Callable[Concatenate[T, P], AsyncIterator[R]], /
    ) -> Callable[P, AsyncGenerator[R, None]]: ...
    @overload
    def method(  # type: ignore[overload-overlap]
        self, method: Callable[Concatenate[T, P], Iterator[R]], /
    ) -> Callable[P, AsyncGenerator[R, None]]: ...
    @overload
    def method(
        self, method: Callable[Concatenate[T, P], Awaitable[R]], /
    ) -> Callable[P, Coroutine[Any, Any, R]]: ...
    @overload
    def method(
        self, method: Callable[Concatenate[T, P], R], /
    ) -> Callable[P, Coroutine[Any, Any, R]]: ...
    @overload
    def method(self, method: str, /) -> Callable[..., Any]: ...
    def method(self, method: str | Callable[..., Any], /) -> Callable[..., Any]:
        """Return a method of the object, to be called here.

        Args:
            method: of the class, `Counter.add`, so that type checkers see its
                parameters and its result; or its name.

        Raises:
            AttributeError: the class has no public method of this name.
            UsageError: `method` is not one of the class.

        Example:
            >>> add = actor.method(Counter.add)
            >>> total = await add(2)
        """
        return self._bound(self._interface.name_of(method))

    def _bound(self, name: str) -> Callable[..., Any]:
        kind = self._interface.kind(name)
        if kind is CALLED:
            return partial(self._run, name)
        serve = owner.items_of if kind is _STREAMED else owner.steps_of
        return partial(self._stream, serve, name)

    async def _run(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method."""
        __tracebackhide__ = True  # notebooks and pytest leave this frame out
        while True:
            rref = self._rref
            try:
                return await getattr(self._proxy, name)(*args, **kwargs)
            except (OwnerLostError, CallError, UnknownWorkerError) as error:
                await self._recover(rref, error, name)

    async def _stream(
        self, serve: Callable[..., Any], name: str, /, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        while True:
            rref = self._rref
            try:
                items = self._peer().stream(serve, rref, name, args, kwargs)
                async with aclosing(items):
                    async for item in items:
                        yield item
            except (OwnerLostError, CallError, UnknownWorkerError) as error:
                await self._recover(rref, error, name)
            else:
                return

    async def _call_owner(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of actors where the object is."""
        while True:
            rref = self._rref
            try:
                return await self._peer().call(function, rref, *args)
            except (OwnerLostError, CallError, UnknownWorkerError) as error:
                await self._recover(rref, error, function.__name__)

    async def _recover(self, rref: RRef[T], error: AsyncRpcError, name: str) -> None:
        """Make the lost object again; raise if it is not lost, or for good."""
        __tracebackhide__ = True  # here as well
        is_unheard_of = isinstance(error, UnknownWorkerError)
        if is_unheard_of and self._here is None and not isinstance(error, RemoteError):
            await current_worker().find(self.worker)  # it came before the news of it
            return
        loss, remaking = _loss_of(rref, error), self._remaking
        if remaking is not None and (
            loss is not None or (_has_not_arrived(error) and remaking.worker_is_gone)
        ):
            async with self._one_remakes:
                if self._rref is rref:
                    self._hold(await remaking.make())
            return
        if loss is not None:
            raise OwnerLostError(
                worker=loss.worker,
                incarnation=loss.incarnation,
                reason=f"{loss.reason}. Actor {self._label} is lost with it: spawn "
                "it again, or let spawn(..., remake=True) do so",
            ) from error
        if isinstance(error, CallError):
            error.function = f"{self._label}.{name}"
        raise error

    async def save(self) -> Any:
        """Return a copy of the object's state: its `__getstate__`, as pickle uses it.

        Of an exclusive actor, no call runs meanwhile.

        Raises:
            OwnerLostError: the worker of the actor is lost.
            CallError: the state cannot be copied or sent, or the call failed.

        Cancellation:
            Nothing changes.
        """
        return await self._call_owner(owner.save)

    async def load(self, state: Any) -> None:
        """Give the object a state: by its `__setstate__`, or to its `__dict__`.

        Of an exclusive actor, no call runs meanwhile.

        Args:
            state: as `save` returns it.

        Raises:
            OwnerLostError: the worker of the actor is lost.
            CallError: the state cannot be sent or set, or the call failed.

        Cancellation:
            It may have been set.
        """
        await self._call_owner(owner.load, state)

    def release(self) -> None:
        """Give the reference back now, instead of when this is collected.  Idempotent.

        Any later use raises RRefDeletedError.
        """
        self._rref.release()

    @property
    def _label(self) -> str:
        return f"{self._interface.cls.__name__}[{self.index}]"

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Travel in a call: the reference does, and is not made again elsewhere."""
        return _arrived, (self._interface.cls, self.index, self._rref)

    def __repr__(self) -> str:
        return f"<Actor {self._label} on {self.worker!r}>"

    def _repr_html_(self) -> str:
        rows = [
            (
                "class",
                f"{self._interface.cls.__module__}.{self._interface.cls.__name__}",
            ),
            ("worker", self.worker),
            ("made again", "if its worker is lost" if self._remaking else "never"),
        ]
        return panel(f"Actor {self._label}", rows=rows)


def _loss_of(rref: RRef[Any], error: BaseException | None) -> OwnerLostError | None:
    """Return what says in an error that the value of a reference is lost."""
    if isinstance(error, RemoteError):
        return None  # of a reference that the method has used
    if isinstance(error, EncodeError):
        return _loss_of(rref, error.__cause__)  # a lost reference cannot be sent
    if not isinstance(error, OwnerLostError):
        return None
    owner = rref.owner_id
    is_its = (error.worker, error.incarnation) == (owner.name, owner.incarnation)
    return error if is_its else None


def _has_not_arrived(error: AsyncRpcError) -> bool:
    """Return whether a call has not reached its worker."""
    if isinstance(error, RemoteError):
        return False
    if isinstance(error, WorkerLostError):
        return error.outcome is Outcome.NOT_EXECUTED
    return isinstance(error, UnknownWorkerError)


def _arrived(cls: type[T], index: int, rref: RRef[T]) -> Actor[T]:
    return Actor(None, ActorClass(cls), index, rref)
