"""Fan-out: one function called on several peers, its arguments encoded once.

The requests to all peers share the encoded arguments, and the tensors that they view.
References (RRefs) must be counted per receiver and cannot be shared: such arguments are
encoded for each peer, which only a profiler shows.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from types import MappingProxyType
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Generic,
    ParamSpec,
    Self,
    TypeVar,
    cast,
    overload,
)

from asyncrpc.core.arguments import UNSET, check_kind, listed
from asyncrpc.core.calls.common_arguments import CommonArguments
from asyncrpc.core.calls.context import effective_deadline
from asyncrpc.core.calls.futures import CallFuture, call_site
from asyncrpc.core.calls.tracing import end_unsent
from asyncrpc.core.devices.streams import marks_here, take_marks
from asyncrpc.core.options import PLAIN, CallOptions, with_options
from asyncrpc.core.peers.peer import Peer
from asyncrpc.errors import AsyncRpcError, EncodeError, UsageError

if TYPE_CHECKING:
    from asyncrpc.core.links.link import Link
    from asyncrpc.core.loop.clock import Deadline
    from asyncrpc.core.peers.peer import CallStarter

P = ParamSpec("P")
T = TypeVar("T")

# Connections that one fan-out makes at the same time.  Each handshake is a few
# milliseconds of work here; more at once would only make all of them late.
DIALS_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class GroupReply(Generic[T]):
    """The answer of one peer of a group.

    Attributes:
        peer: name of the peer.
        future: its call, which is done.  `future.stats` counts the bytes.
    """

    peer: str
    future: CallFuture[T]

    @property
    def error(self) -> BaseException | None:
        """Return the error of the call; None if it did not fail."""
        if self.future.cancelled():
            return asyncio.CancelledError()
        return self.future.exception()

    def result(self) -> T:
        """Return the result, or raise what the call failed with."""
        return self.future.result()


class GroupCall(AsyncIterator[GroupReply[T]], Generic[T]):
    """One function that runs on several peers; from `PeerGroup.call`.

    Await it for all results, in the order of the group's peers; or iterate over it for
    each reply as it arrives.  It has begun, whether or not it is awaited.

    Attributes:
        futures: the call to each peer, by name, in the order of the group.
    """

    def __init__(self, calls: CallStarter, futures: Sequence[CallFuture[T]]) -> None:
        self._calls = calls
        self.futures: Mapping[str, CallFuture[T]] = MappingProxyType(
            {future.to: future for future in futures}
        )
        self._arrived: deque[CallFuture[T]] = deque()  # and not taken
        self._missing = len(futures)  # not taken
        self._news = asyncio.Event()
        for future in futures:
            future.add_done_callback(self._on_done)

    def cancel(self) -> None:
        """Cancel every call that has not ended; the peers are told."""
        for future in self.futures.values():
            future.cancel()

    def __await__(self) -> Generator[Any, None, list[T]]:
        """Wait for all; the first error cancels the calls that have not ended."""
        return self._all().__await__()

    async def _all(self) -> list[T]:
        self._calls.loop_guard.check_loop("GroupCall")
        try:
            return await asyncio.gather(*self.futures.values())
        except BaseException:
            self.cancel()
            raise

    def __aiter__(self) -> GroupCall[T]:
        return self

    async def __anext__(self) -> GroupReply[T]:
        self._calls.loop_guard.check_loop("GroupCall")
        while not self._arrived:
            if not self._missing:
                raise StopAsyncIteration
            self._news.clear()
            try:
                await self._news.wait()  # each call ends, at least with its link
            except asyncio.CancelledError:
                self.cancel()
                raise
        self._missing -= 1
        if not self._missing:
            self._news.set()  # other iterators have nothing to wait for
        future = self._arrived.popleft()
        return GroupReply(future.to, future)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        """Cancel the calls that have not ended, however the block ends."""
        self.cancel()

    def _on_done(self, future: asyncio.Future[T]) -> None:
        self._arrived.append(cast("CallFuture[T]", future))
        self._news.set()

    def __repr__(self) -> str:
        done = sum(future.done() for future in self.futures.values())
        return f"<GroupCall {done} of {len(self.futures)} done>"


class PeerGroup:
    """Several other workers, by name; from `Worker.group`.  It holds no connection.

    Attributes:
        names: of the workers, in the order in which results are returned.
    """

    __slots__ = ("_calls", "_options", "names")

    def __init__(
        self, calls: CallStarter, names: Sequence[str], options: CallOptions = PLAIN
    ) -> None:
        self._calls = calls
        self._options = options
        self.names = tuple(names)

    def using(self, **options: Any) -> PeerGroup:
        """Return this group with other options for the calls made through it.

        Args:
            **options: `timeout_s` (seconds, for all the calls of a fan-out together),
                `codec` and `device_map`; an option that is left out stays as it is.
                See `Peer.using`.

        Raises:
            UsageError: there is no such option, or its value is not valid; or `out` is
                given, but several results cannot be received into one tensor.

        Example:
            >>> await worker.group(["a", "b"]).using(timeout_s=2.0).call(step, batch)
        """
        chosen = with_options(self._options, options)
        if chosen.out is not None:
            raise UsageError("`out` is for one result; call the peers one by one")
        return PeerGroup(self._calls, self.names, chosen)

    @overload
    def call(
        self, function: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> GroupCall[T]: ...
    @overload
    def call(
        self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> GroupCall[T]: ...
    def call(
        self, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> GroupCall[Any]:
        """Run `function` on every peer of the group with the same arguments.

        The arguments are encoded once, and a tensor among them is sent to all from
        where it lies: do not write to it until every call has ended.  Peers that are
        not connected yet are connected to at the same time.  Begin this on the worker's
        event loop.

        One deadline, the enclosing `asyncrpc.deadline` or `using(timeout_s=...)`,
        covers all the calls.  Cancelling the awaiting or iterating task cancels the
        calls that have not ended.

        Args:
            function: as for `Peer.call`.
            *args: as for `Peer.call`.
            **kwargs: as for `Peer.call`.

        Returns:
            A `GroupCall`, which has begun.  Awaited, it returns a list of the results
            in the order of the group; the first error cancels the other calls and is
            raised (its `to` is the peer's name).  Iterated over, it gives a
            `GroupReply` for each peer as it arrives; an error is raised by
            `GroupReply.result()`, so that the loop can go on with the others.  An empty
            group has no results.

        Raises:
            EncodeError: an argument cannot be sent.  Nothing was sent.
            UnknownWorkerError: a peer has gone from the directory.  Nothing was sent.
            NotStartedError: this worker does not run.
            UsageError: called in another thread than the event loop's.

        Example:
            >>> group = worker.group(["a", "b", "c"])
            >>> losses = await group.call(step, batch)
            >>> async for reply in group.call(step, batch):
            ...     print(reply.peer, reply.result())

        Source: asyncio.gather and asyncio.as_completed; unlike gather, the first error
        cancels the rest.
        """
        calls = self._calls
        calls.loop_guard.check_on_loop("PeerGroup.call")
        target, values = calls.describe(function, args, kwargs)
        name = target or str(getattr(function, "__qualname__", function))
        site = call_site(1)
        futures = [calls.new_call(name.rpartition(":")[2], to) for to in self.names]
        for future in futures:
            future.options = self._options
            future.site = site
        deadline = _deadline(calls, self._options.timeout_s)
        try:
            _FanOut(calls, target, values, deadline).start(futures)
        except BaseException as error:
            for future in futures:
                end_unsent(future, error)
            raise
        return GroupCall(calls, futures)

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        return f"<PeerGroup {', '.join(self.names)} of {self._calls.name!r}>"


def group_of(calls: CallStarter, peers: Iterable[str | int | Peer]) -> PeerGroup:
    """Return the group of these peers; see `Worker.group`."""
    entries = listed("peers", peers, "a list of names, ranks or peers")
    names = [_name_of(calls, peer) for peer in entries]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(f"peers must name each worker once; repeated: {twice}")
    return PeerGroup(calls, names)


def _name_of(calls: CallStarter, peer: str | int | Peer) -> str:
    if not isinstance(peer, Peer):
        check_kind("each of peers", peer, (str, int), "a name, a rank or a Peer")
        return calls.directory.member(peer).name
    if peer._calls is not calls or peer._options != PLAIN:  # noqa: SLF001
        raise UsageError(
            f"{peer!r} is a peer of another worker, or has options of its own; make "
            "groups of names, and set options with `group.using(...)`"
        )
    return peer.name


def _deadline(calls: CallStarter, timeout_s: Any) -> Deadline | None:
    if timeout_s is UNSET:
        timeout_s = calls.options.rpc_timeout_s
    return effective_deadline(timeout_s, calls.loop.time())


class _FanOut:
    """One set of arguments on its way to several peers."""

    def __init__(
        self,
        calls: CallStarter,
        target: str | None,
        values: tuple[list[Any], dict[str, Any]],
        deadline: Deadline | None,
    ) -> None:
        self._calls = calls
        self._target = target
        self._arguments = CommonArguments(values)
        self._deadline = deadline
        self._meta = calls.meta_here()
        self._marks = marks_here()

    def start(self, futures: Sequence[CallFuture[Any]]) -> None:
        """Send to connected peers, and begin to connect to the others."""
        entries = [self._calls.directory.find(future.to) for future in futures]
        absent, is_sent = [], False
        for future, entry in zip(futures, entries, strict=True):
            if entry.link is None:
                absent.append(future)
                continue
            try:
                self._start_on(entry.link, future)
                is_sent = True
            except AsyncRpcError as error:
                if isinstance(error, EncodeError) and not is_sent:
                    raise
                future.fail(error)
        dials = asyncio.Semaphore(DIALS_MAX)
        for future in absent:
            future.begun = self._calls.start_task(self._connect(future, dials))

    def _start_on(self, link: Link, future: CallFuture[Any]) -> None:
        take_marks(self._marks)
        link.start_common(
            future,
            self._target,
            self._arguments,
            deadline=self._deadline,
            meta=dict(self._meta),
        )

    async def _connect(self, future: CallFuture[Any], dials: asyncio.Semaphore) -> None:
        await self._calls.connect_and_start(
            future,
            lambda link: self._start_on(link, future),
            deadline=self._deadline,
            turn=dials,
        )
