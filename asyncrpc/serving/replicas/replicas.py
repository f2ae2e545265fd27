"""Several workers that do the same, called as one.

`Replicas` is the public interface; `router` knows the replicas, `call` makes attempts,
`machine` decides.
"""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
)
from dataclasses import dataclass, replace
from types import NoneType, TracebackType
from typing import Any, ParamSpec, Self, TypeVar, overload

from asyncrpc import current_worker
from asyncrpc.core.arguments import (
    UNSET,
    check_count,
    check_kind,
    check_text,
    check_timeout,
)
from asyncrpc.core.calls.context import effective_deadline
from asyncrpc.core.calls.repeating import is_idempotent
from asyncrpc.core.options import PLAIN, CallOptions
from asyncrpc.core.worker import Worker
from asyncrpc.errors import NotStartedError, UsageError
from asyncrpc.extend import host_of
from asyncrpc.serving.replicas.call import (
    CallCounts,
    ReplicaAnswer,
    ReplicaCall,
    key_bytes,
    starter,
    stream_from,
)
from asyncrpc.serving.replicas.options import ReplicaOptions
from asyncrpc.serving.replicas.router import ReplicaRouter

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """One replica, as its router sees it.

    Attributes:
        name: of its worker.
        state: `"JOINING"`, `"WARMING"`, `"READY"`, `"EJECTED"` or `"DRAINING"`.
        load: calls that it works on, as far as is known.
        outstanding: how many of these are from this router.
        calls: how many this router has ever given it.
        version: of its weights, as last reported; None: it has none.
        canary: share of the calls that canaries get; 0: it is not a canary.
    """

    name: str
    state: str
    load: float
    outstanding: int
    calls: int
    version: int | None
    canary: float


@dataclass(frozen=True, slots=True)
class ReplicaStatistics:
    """The calls of a router, and the state of its replicas.

    Attributes:
        replicas: by name.
        calls: calls and streams of the program.
        retries: attempts after another had failed.
        retries_refused: retries that the budget did not allow.
        hedges: attempts in parallel with a slow one.
        hedges_won: how many of these answered first.
        hedges_refused: hedged calls that the budget did not allow.
        ejections: how often a replica was left out because it failed.
    """

    replicas: tuple[ReplicaStatus, ...]
    calls: int
    retries: int
    retries_refused: int
    hedges: int
    hedges_won: int
    hedges_refused: int
    ejections: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _RoutedOptions:
    """How one call to replicas is made; see `Replicas.using`."""

    key: bytes | None = None
    idempotent: bool = False
    call: CallOptions = PLAIN


class Replicas:
    """Workers that do the same, called as one; an asynchronous context manager.

    A call goes to the less loaded of two replicas that are chosen at random.  If a
    replica did not run it, because it drains, is overloaded, or was lost before it got
    the call, another replica runs it.  If the replica was lost when it may already have
    run it, the call fails, unless the function is idempotent (`asyncrpc.idempotent`);
    such a call is also made once more if it takes longer than most, and the first
    answer counts.

    Replicas are the members of the group whose names match and that have entered a
    `Replica`.  They come and go while calls are made; a worker that is started again is
    a new replica.  Routers share nothing: each may be in its own process.

    Example:
        >>> async with serving.Replicas(worker, "model-*") as replicas:
        ...     logits = await replicas.call(predict, row)
        ...     again = await replicas.using(key=user).call(complete, prompt)

    Source: see docs/explanation/replicas.md.
    """

    def __init__(
        self,
        worker: Worker | None,
        names: str,
        *,
        options: ReplicaOptions | None = None,
    ) -> None:
        """Describe the replicas; `async with` begins to follow them.

        Args:
            worker: the worker that calls them; None: the current one.
            names: a pattern of their names, such as `model-*`; see `fnmatch`.
            options: how calls are spread.

        Raises:
            UsageError: an argument has the wrong type.
        """
        if worker is not None:
            check_kind("worker", worker, Worker, "a Worker or None")
        check_text("names", names)
        wanted = "a ReplicaOptions or None"
        check_kind("options", options, (ReplicaOptions, NoneType), wanted)
        self._worker = worker
        self._names = names
        self._options = options or ReplicaOptions()
        self._router: ReplicaRouter | None = None
        self._counts = CallCounts()
        self._plain = RoutedCalls(self._entered, self._counts, _RoutedOptions())

    async def __aenter__(self) -> Self:
        """Begin to follow the replicas; do not wait for any.

        Raises:
            NotStartedError: the worker does not run, or there is no current worker.
            UsageError: this object was entered before, or this is not the worker's
                event loop.

        Cancellation:
            It never waits.
        """
        if self._router is not None:
            raise UsageError("a Replicas is entered once; make a new one")
        worker = self._worker or current_worker()
        host_of(worker).check_on_loop("Replicas")
        self._router = ReplicaRouter(worker, self._names, self._options)
        self._router.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop following the replicas.  Calls under way go on.

        Raises:
            UsageError: this is not the worker's event loop.
        """
        assert self._router is not None  # it was entered
        self._router.host.check_loop("Replicas")
        await self._router.close()

    def using(self, **options: Any) -> RoutedCalls:
        """Return the same replicas, with other options for calls made through them.

        Args:
            **options: `key`: a string, bytes or an integer: calls with the same key go
                    to the same replica as long as it is ready, from all routers.
                    Useful for caches, such as of a session or a prompt's prefix.
                `idempotent`: whether the function may run twice.
                `timeout_s`: seconds for all attempts together.
                `codec`, `device_map`: as in `Peer.using`.

        Raises:
            UsageError: an option is unknown, or a value has the wrong type.

        Example:
            >>> await replicas.using(key=session, timeout_s=2.0).call(complete, prompt)
        """
        return self._plain.using(**options)

    @overload
    async def call(
        self, function: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> T: ...
    @overload
    async def call(
        self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T: ...
    async def call(
        self, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Run `function` on one of the replicas and return its result.

        Args:
            function: as for `Peer.call`.
            *args: its positional arguments.  Do not write to a tensor until the call
                returns.
            **kwargs: its keyword arguments.

        Returns:
            What `function` returned.

        Raises:
            RemoteError: `function` raised.
            RejectedError: no replica is ready, or none takes the call; it was not run.
                `OverloadedError` says when to try again.
            WorkerLostError: the replica is gone; `outcome` says whether it may have run
                the function.
            DeadlineExceededError: the deadline passed.
            EncodeError: an argument cannot be sent.  Nothing was sent.
            UsageError: this is not the worker's event loop.
            NotStartedError: this object has not been entered.

        Cancellation:
            All attempts are cancelled, also on the replicas.

        Example:
            >>> logits = await replicas.call(predict, row)
        """
        return (await self._plain.answer(function, *args, **kwargs)).value

    async def answer(
        self, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> ReplicaAnswer[Any]:
        """Run `function` on one of the replicas; return its result and its origin.

        Args:
            function: as for `call`.
            *args: its positional arguments.
            **kwargs: its keyword arguments.

        Returns:
            The result, the replica's name, and the version of its weights.

        Raises:
            AsyncRpcError: as for `call`.

        Cancellation:
            As for `call`.
        """
        return await self._plain.answer(function, *args, **kwargs)

    @overload
    def stream(
        self,
        function: Callable[P, AsyncIterator[T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> AsyncGenerator[T, None]: ...
    @overload
    def stream(
        self,
        function: Callable[P, Iterator[T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> AsyncGenerator[T, None]: ...
    def stream(
        self, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        """Run a generator on one of the replicas and yield its items as they come.

        Until the first item it may move to another replica, as a call does; from then
        on it stays.  Close it like a stream of `Peer.stream`.

        Args:
            function: a generator function.
            *args: as for `call`.
            **kwargs: likewise.

        Yields:
            The items, in order.

        Raises:
            AsyncRpcError: as for `call`; a WorkerLostError also after some items.

        Cancellation:
            The generator is closed; this does not wait for it.

        Example:
            >>> async with aclosing(replicas.stream(complete, prompt)) as tokens:
            ...     async for token in tokens:
            ...         print(token)
        """
        return self._plain.stream(function, *args, **kwargs)

    async def wait_ready(self, count: int = 1, timeout_s: float | None = None) -> None:
        """Wait until `count` replicas take calls.

        Args:
            count: of replicas.
            timeout_s: seconds to wait; None: no limit.

        Raises:
            TimeoutError: `timeout_s` passed.
            UsageError: an argument has the wrong type.
            NotStartedError: this object has not been entered.

        Cancellation:
            Nothing has changed.
        """
        check_count("count", count, at_least=1)
        check_timeout("timeout_s", timeout_s)
        router = self._entered("Replicas.wait_ready")
        async with asyncio.timeout(timeout_s):
            await router.wait_ready(count)

    def statistics(self) -> ReplicaStatistics:
        """Return the state of the replicas, and the counts of the calls.

        Raises:
            NotStartedError: this object has not been entered.
        """
        router, counts = self._entered("Replicas.statistics"), self._counts
        now_s = router.worker.loop.time()
        router.routing.tick(now_s)
        return ReplicaStatistics(
            replicas=tuple(
                ReplicaStatus(
                    name=record.name,
                    state=record.life.state.name,
                    load=record.load(now_s),
                    outstanding=record.outstanding,
                    calls=record.calls,
                    version=record.version,
                    canary=record.canary,
                )
                for record in router.routing.records
            ),
            calls=counts.calls,
            retries=counts.retries,
            retries_refused=counts.retries_refused,
            hedges=counts.hedges,
            hedges_won=counts.hedges_won,
            hedges_refused=router.routing.hedges.refused,
            ejections=router.ejections,
        )

    def _entered(self, used: str) -> ReplicaRouter:
        if self._router is None:
            raise NotStartedError("use `async with serving.Replicas(...)` first")
        self._router.host.check_on_loop(used)
        return self._router

    def __repr__(self) -> str:
        return f"<Replicas {self._names!r}>"


class RoutedCalls:
    """Calls to replicas with options of their own; from `Replicas.using`."""

    __slots__ = ("_counts", "_options", "_router")

    def __init__(
        self,
        router: Callable[[str], ReplicaRouter],
        counts: CallCounts,
        options: _RoutedOptions,
    ) -> None:
        self._router = router
        self._counts = counts
        self._options = options

    def using(self, **options: Any) -> RoutedCalls:
        """Return the same with more options; see `Replicas.using`.

        Raises:
            UsageError: an option is unknown, or a value has the wrong type.
        """
        known = {"key", "idempotent", "timeout_s", "codec", "device_map"}
        unknown = sorted(options.keys() - known)
        if unknown:
            names = ", ".join(sorted(known))
            raise UsageError(
                f"there is no call option {unknown[0]!r}; the options are {names}"
            )
        mine = self._options
        call = replace(
            mine.call,
            **{name: options[name] for name in known - {"key"} if name in options},
        )
        key = key_bytes(options["key"]) if "key" in options else mine.key
        routed = _RoutedOptions(
            key=key, idempotent=call.idempotent, call=replace(call, idempotent=False)
        )
        if "idempotent" not in options:
            routed = replace(routed, idempotent=mine.idempotent)
        return RoutedCalls(self._router, self._counts, routed)

    async def call(
        self, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Run `function` on one of the replicas; see `Replicas.call`.

        Args:
            function: as there.
            *args: its positional arguments.
            **kwargs: its keyword arguments.

        Raises:
            AsyncRpcError: as there.

        Cancellation:
            All attempts are cancelled.
        """
        return (await self.answer(function, *args, **kwargs)).value

    async def answer(
        self, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> ReplicaAnswer[Any]:
        """Run `function`; return its result and its origin; see `Replicas.answer`.

        Args:
            function: as there.
            *args: its positional arguments.
            **kwargs: its keyword arguments.

        Raises:
            AsyncRpcError: as there.

        Cancellation:
            All attempts are cancelled.
        """
        return await self._new_call("Replicas.call", function, args, kwargs).run()

    def stream(
        self, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        """Run a generator on one of the replicas; see `Replicas.stream`.

        Args:
            function: as there.
            *args: its positional arguments.
            **kwargs: its keyword arguments.

        Yields:
            The items, in order.

        Raises:
            AsyncRpcError: as there.

        Cancellation:
            The generator is closed.
        """
        call = self._new_call("Replicas.stream", function, args, kwargs)
        return stream_from(call, function, args, kwargs, self._options.call)

    def _new_call(
        self, used: str, function: Callable[..., Any], args: Any, kwargs: Any
    ) -> ReplicaCall:
        router, options = self._router(used), self._options
        name, start = starter(router, function, args, kwargs, options.call)
        timeout_s = options.call.timeout_s
        if timeout_s is UNSET:
            timeout_s = router.worker.options.rpc_timeout_s
        return ReplicaCall(
            router=router,
            counts=self._counts,
            function=name,
            start=start,
            key=options.key,
            is_idempotent=options.idempotent or is_idempotent(function),
            deadline=effective_deadline(timeout_s, router.worker.loop.time()),
        )
