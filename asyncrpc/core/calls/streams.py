"""Streams: the values of a generator on another worker, one by one, with credit.

The producer runs ahead of its consumer by at most `LimitOptions.stream_items_max` items
and about `stream_bytes_max` bytes; the consumer gives credit as it takes items.  The
order of items, and how far a producer may run ahead, are decided in `machine.streams`.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any, Final, Self, TypeAlias, TypeVar

from asyncrpc.core.calls.futures import CallFuture
from asyncrpc.core.calls.inbound import InboundCall
from asyncrpc.core.calls.machine.streams import (
    StreamCredit,
    StreamOrder,
    StreamState,
)
from asyncrpc.core.calls.modes import Mode, Target
from asyncrpc.core.calls.ports import CallLink
from asyncrpc.core.devices.maps import DeviceMap
from asyncrpc.core.loop.clock import Deadline
from asyncrpc.core.loop.waits import WaitDescription, WaitKind, waits
from asyncrpc.core.options import LimitOptions
from asyncrpc.core.torch_modes import surrounded
from asyncrpc.errors import CallError, DeadlineExceededError, MalformedError, Outcome

T = TypeVar("T")

_END: Final = object()
_NOT_YET: Final = object()
# A producer runs ahead by its own options.  Beyond so many times those of the consumer,
# or the defaults if they are more, it has broken the protocol.
AHEAD: Final = 4
ITEMS_AHEAD_MIN: Final = 16 * AHEAD
BYTES_AHEAD_MIN: Final = (32 << 20) * AHEAD


class StreamProducer:
    """The credit of one stream at its producer."""

    def __init__(self, items_max: int, bytes_max: int) -> None:
        self._credit = StreamCredit(items_max, bytes_max)
        self._room = asyncio.Event()
        self._room.set()

    @property
    def outstanding(self) -> int:
        """Items sent and not taken."""
        return self._credit.outstanding

    def spend(self, nbytes: int) -> None:
        """Count an item of `nbytes` bytes that has been sent."""
        self._credit.spend(nbytes)
        if not self._credit.has_room:
            self._room.clear()

    def grant(self, items: int) -> None:
        """Count `items` more items that the consumer has taken."""
        self._credit.grant(items)
        if self._credit.has_room:
            self._room.set()

    @waits(
        lambda _: WaitDescription(WaitKind.CREDIT, "room at the consumer of its stream")
    )
    async def wait(self) -> None:
        """Wait until one more item may be sent."""
        await self._room.wait()  # a consumer that is lost, or leaves, cancels this


class StreamReceiver:
    """The consumer's end of one stream.

    Attributes:
        link: it comes over.
        function: name of the generator.
        to: name of the producer.
        call_id: of the call that asked for it.
        began_s: when it was asked for, by the clock of the worker.
        task: name of the task that asked for it.
        request_bytes: of its buffers, if they are many: see `credit`.
        pins: what must live until the producer has answered.
        device_map: of the arguments; items come back by it.
        error: the error that it has failed with.
        note: what came beside the items, or the end, last; None: nothing did.
        outcome_if_lost: what can be said of the generator if the link is lost.
    """

    outcome_if_lost: Final = Outcome.UNKNOWN

    def __init__(
        self,
        link: CallLink,
        function: str,
        to: str,
        *,
        limits: LimitOptions,
        began_s: float,
        task: str = "",
    ) -> None:
        self.link = link
        self.function = function
        self.to = to
        self.call_id = 0
        self.began_s = began_s
        self.task = task
        self.request_bytes = 0
        self.pins: Any = None
        self.device_map: DeviceMap | None = None
        self._order: StreamOrder[Any] = StreamOrder()
        self.error: BaseException | None = None
        self.note: Any = None
        self._arrived = asyncio.Event()
        self._unacknowledged = 0  # items taken that the producer has not been told of
        self._ack_every = max(1, limits.stream_items_max // 4)
        self._items_max = max(AHEAD * limits.stream_items_max, ITEMS_AHEAD_MIN)
        self._bytes_max = max(AHEAD * limits.stream_bytes_max, BYTES_AHEAD_MIN)
        self._sizes: dict[int, int] = {}  # of items that have not been taken
        self._ahead_bytes = self._arriving = self._arriving_bytes = 0

    def settle(self) -> None:
        """Do nothing: nothing is kept that an answer would free."""

    def on_item_begun(self, nbytes: int) -> None:
        """Count an item whose payload of `nbytes` bytes begins to arrive."""
        self.check_ahead()
        self._arriving += 1
        self._arriving_bytes += nbytes

    def check_ahead(self) -> None:
        """Refuse one more item of a producer that runs too far ahead."""
        items = len(self._sizes) + self._arriving
        nbytes = self._ahead_bytes + self._arriving_bytes
        if items > self._items_max or nbytes > self._bytes_max:
            raise MalformedError(
                f"a stream is {items} items and {nbytes} bytes ahead of its consumer;"
                f" the limits are {self._items_max} and {self._bytes_max}, that is"
                f" {AHEAD} times LimitOptions.stream_items_max and stream_bytes_max, or"
                " of their defaults"
            )

    def on_item(self, serial: int, value: Any, nbytes: int) -> None:
        """Take an item off the wire, which counts for `nbytes` bytes."""
        if self._arriving:
            self._arriving -= 1
            self._arriving_bytes = max(0, self._arriving_bytes - nbytes)
        if not self._arriving:
            self._arriving_bytes = 0
        self._sizes[serial] = nbytes
        self._ahead_bytes += nbytes
        self._order.add(serial, value)
        self._arrived.set()

    def on_end(self, items: int) -> None:
        """Take the end of the stream: the generator returned after `items` items."""
        self._order.end = items
        self._arrived.set()

    def on_error(self, error: BaseException, items: int) -> None:
        """Fail the stream after `items` items."""
        self._order.end = items
        self.error = error
        self._arrived.set()

    def fail(self, error: BaseException) -> None:
        """Fail the stream before its first item."""
        self.on_error(error, 0)

    @property
    def received(self) -> int:
        """How many items have come."""
        return self._order.received

    def has(self, serial: int) -> bool:
        """Return whether an item has come before."""
        return self._order.has(serial)

    @property
    def is_whole(self) -> bool:
        """Return whether the stream has ended and all its items have arrived."""
        return self._order.state is StreamState.WHOLE

    @waits(lambda at: WaitDescription(WaitKind.STREAM, call=at["self"]))
    async def take(self) -> Any:
        """Return the next item, or `END`; raise what ended the stream."""
        order = self._order
        while not order.has_next:
            if order.is_over:
                if self.error is not None:
                    raise self.error
                return _END
            self._arrived.clear()
            await self._arrived.wait()  # the end of the link arrives here, too
        self._ahead_bytes -= self._sizes.pop(order.next_serial)
        value = order.take()
        self._unacknowledged += 1
        if self._unacknowledged >= self._ack_every or order.is_empty:
            self.link.send_credit(self.call_id, self._unacknowledged)
            self._unacknowledged = 0
        return value


async def consume(
    stream: StreamReceiver,
    start: Callable[[Deadline | None], None],
    deadline: Deadline | None,
    on_loop_thread: Callable[[Callable[[], None]], None],
) -> AsyncGenerator[Any, None]:
    """Yield the items of a stream; closing this early closes the remote generator."""
    start(deadline)
    try:
        while (item := await _take_by(stream, deadline)) is not _END:
            yield item
    finally:
        # Does nothing if the stream has ended.  Any thread may close a generator, also
        # after the loop: the collector does so.
        with suppress(RuntimeError):
            on_loop_thread(lambda: stream.link.cancel(stream))


async def link_by(
    deadline: Deadline | None,
    link_to: Callable[[str], Awaitable[T]],
    to: str,
    function: str,
) -> T:
    """Return the link that a stream will come over, before the deadline."""
    try:
        async with asyncio.timeout_at(None if deadline is None else deadline.at_s):
            return await link_to(to)
    except TimeoutError as error:
        if deadline is None or isinstance(error, CallError):
            raise
        raise DeadlineExceededError(
            function=function,
            to=to,
            outcome=Outcome.NOT_EXECUTED,
            timeout_s=deadline.allowed_s,
        ) from error


async def _take_by(stream: StreamReceiver, deadline: Deadline | None) -> Any:
    """Take the next item, before the deadline."""
    if deadline is None:
        return await stream.take()
    try:
        async with asyncio.timeout_at(deadline.at_s):
            return await stream.take()
    except TimeoutError as error:
        if isinstance(error, CallError):  # the producer's own, or the peer's deadline
            raise
        raise DeadlineExceededError(
            function=stream.function,
            to=stream.to,
            outcome=Outcome.UNKNOWN,
            timeout_s=deadline.allowed_s,
        ) from error


OutboundCall: TypeAlias = CallFuture[Any] | StreamReceiver


def serve(
    inbound: InboundCall, target: Target, args: list[Any], kwargs: dict[str, Any]
) -> None:
    """Run a generator and send what it yields."""
    limits = inbound.host.limits
    function = surrounded(target.function)
    inbound.target = target
    inbound.credit = StreamProducer(limits.stream_items_max, limits.stream_bytes_max)
    if target.mode is Mode.ASYNC_GENERATOR:
        source = function(*args, **kwargs)
    else:
        source = _Steps(inbound, function, args, kwargs)
    inbound.start_stream(_produce(inbound, source))


async def _produce(inbound: InboundCall, source: Any) -> None:
    """Send the items of `source` as credit allows."""
    responder, credit, sent = inbound.responder, inbound.credit, 0
    room = responder.backlog.room
    try:
        async with aclosing(source):
            await room()  # before there is an item that would wait
            async for item in source:
                await credit.wait()
                await room()
                credit.spend(responder.send_item(inbound, sent, item))
                sent += 1
                await room()
    except asyncio.CancelledError as error:
        inbound.on_cancelled(error, items=sent)
    except BaseException as error:  # noqa: BLE001  (the consumer gets it)
        responder.answer_error(inbound, error, items=sent)
    else:
        responder.end_stream(inbound, sent)


class _Steps:
    """The items of a plain generator, which is stepped in threads of the pool.

    All steps have one context, so that what a step sets is there in the next one.  It
    is a copy of the call's, which the task that waits may not have left yet.

    It is not an asynchronous generator: such a one ends with an error of its own if the
    generator that it steps raises GeneratorExit.
    """

    __slots__ = (
        "_args",
        "_context",
        "_function",
        "_generator",
        "_inbound",
        "_kwargs",
        "_step",
    )

    def __init__(
        self,
        inbound: InboundCall,
        function: Callable[..., Any],
        args: list[Any],
        kwargs: dict[str, Any],
    ) -> None:
        self._inbound = inbound
        self._context = inbound.in_context(_copy_context, None)
        self._function = function
        self._args = args
        self._kwargs = kwargs
        self._generator: Any = None
        self._step: asyncio.Future[Any] | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        backlog = self._inbound.responder.backlog
        while True:
            self._step = self._in_thread(self._next)
            item = await asyncio.shield(self._step)
            if item is not _NOT_YET:
                break
            await backlog.room()
        if item is _END:
            raise StopAsyncIteration
        return item

    async def aclose(self) -> None:
        """Close the generator, once its step has ended.

        A step cannot be interrupted, and a generator that runs cannot be closed.
        """
        if self._step is not None:
            await asyncio.gather(self._step, return_exceptions=True)
            await self._in_thread(self._close)

    def _in_thread(self, job: Callable[[], Any]) -> asyncio.Future[Any]:
        return self._inbound.host.run_in_thread(lambda: self._context.run(job))

    def _next(self) -> Any:
        if self._inbound.responder.backlog.is_pressed:
            return _NOT_YET  # others have filled the room while it waited for a thread
        if self._generator is None:
            self._generator = self._function(*self._args, **self._kwargs)
        try:
            return next(self._generator, _END)
        except StopAsyncIteration as error:  # it would end the stream as if in order
            raise RuntimeError("generator raised StopAsyncIteration") from error

    def _close(self) -> None:
        if self._generator is not None:
            self._generator.close()


def _copy_context(_: None) -> contextvars.Context:
    return contextvars.copy_context()
