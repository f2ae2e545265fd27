"""Streams: the values of a generator on another worker, one by one, with credit.

The producer runs ahead of its consumer by at most `Options.stream_items_max` items and
about `stream_bytes_max` bytes; the consumer gives credit as it takes items.  Large
items may overtake small ones on the wire, so items are numbered and put in order.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final, Self

from asyncrpc.errors import CallError, DeadlineExceededError, Outcome
from asyncrpc.runtime.calls.inbound import InboundCall, Mode, Target

if TYPE_CHECKING:
    from asyncrpc.clock import Deadline
    from asyncrpc.runtime.devices.maps import DeviceMap
    from asyncrpc.runtime.links.link import Link
    from asyncrpc.runtime.worker import Worker

_END: Final = object()


class Credit:
    """How far a producer may run ahead.  One item may always be on its way."""

    def __init__(self, items_max: int, bytes_max: int) -> None:
        self._items_max = items_max
        self._bytes_max = bytes_max
        self._sizes: deque[int] = (
            deque()
        )  # of the items not taken yet, the oldest first
        self._bytes = 0
        self._room = asyncio.Event()
        self._room.set()

    @property
    def outstanding(self) -> int:
        """Items sent and not taken."""
        return len(self._sizes)

    def spend(self, nbytes: int) -> None:
        """An item of `nbytes` bytes has been sent."""
        self._sizes.append(nbytes)
        self._bytes += nbytes
        if len(self._sizes) >= self._items_max or self._bytes >= self._bytes_max:
            self._room.clear()

    def grant(self, items: int) -> None:
        """The consumer has taken `items` more items."""
        for _ in range(min(items, len(self._sizes))):
            self._bytes -= self._sizes.popleft()
        if len(self._sizes) < self._items_max and self._bytes < self._bytes_max:
            self._room.set()

    async def wait(self) -> None:
        """Wait until one more item may be sent.

        Cancellation:
            Nothing has changed.
        """
        await self._room.wait()  # a consumer that is lost, or leaves, cancels this


class Inflow:
    """The consumer's end of one stream."""

    def __init__(self, link: Link, function: str, to: str) -> None:
        self.link = link
        self.function = function
        self.to = to
        self.call_id = 0
        self.request_bytes = 0  # of its buffers, if they are many: see `credit`
        self.pins: Any = None
        self.device_map: DeviceMap | None = None  # items come back by it
        self._items: dict[int, Any] = {}
        self._next = 0  # serial of the item to be taken next
        self._end: int | None = None  # how many items there are in all
        self._error: BaseException | None = None
        self._arrived = asyncio.Event()
        self._untold = 0  # items taken that the producer has not been told of
        self._tell_at = max(1, link.worker.options.stream_items_max // 4)

    def settle(self) -> None:
        """Nothing is kept that an answer would free."""

    def on_item(self, serial: int, value: Any) -> None:
        """Take an item off the wire."""
        self._items[serial] = value
        self._arrived.set()

    def on_end(self, items: int) -> None:
        """The generator has returned, after so many items."""
        self._end = items
        self._arrived.set()

    def on_error(self, error: BaseException, items: int) -> None:
        """The stream has failed, after so many items."""
        self._end = items
        self._error = error
        self._arrived.set()

    def fail(self, error: BaseException) -> None:
        """The stream has failed before its first item."""
        self.on_error(error, 0)

    @property
    def received(self) -> int:
        """How many items have come."""
        return self._next + len(self._items)

    def has(self, serial: int) -> bool:
        """Say whether an item has come before."""
        return serial < self._next or serial in self._items

    @property
    def is_whole(self) -> bool:
        """Whether the stream has ended and all its items have arrived."""
        return self._end is not None and self._next + len(self._items) >= self._end

    async def take(self) -> Any:
        """Return the next item, or `END`; raise what ended the stream.

        Cancellation:
            No item is lost.
        """
        while self._next not in self._items:
            if self._end is not None and self._next >= self._end:
                if self._error is not None:
                    raise self._error
                return _END
            self._arrived.clear()
            await self._arrived.wait()  # the end of the link arrives here, too
        value = self._items.pop(self._next)
        self._next += 1
        self._untold += 1
        if self._untold >= self._tell_at or not self._items:
            self.link.send_credit(self.call_id, self._untold)
            self._untold = 0
        return value


async def consume(
    link: Link,
    inflow: Inflow,
    start: Callable[[Deadline | None], None],
    deadline: Deadline | None,
) -> AsyncGenerator[Any, None]:
    """Yield the items of a stream; closing this early closes the remote generator."""
    start(deadline)
    try:
        while (item := await _take_by(inflow, deadline)) is not _END:
            yield item
    finally:
        link.cancel(inflow)  # does nothing if the stream has ended


async def link_by(
    deadline: Deadline | None, worker: Worker, to: str, function: str
) -> Link:
    """Return the link that a stream is to come over, before the deadline.

    Raises:
        DeadlineExceededError: there was none in time; nothing was sent.
        WorkerLostError: the worker cannot be reached.
    """
    try:
        async with asyncio.timeout_at(None if deadline is None else deadline.at_s):
            return await worker.link_to(to)
    except TimeoutError as error:
        if deadline is None or isinstance(error, CallError):
            raise
        raise DeadlineExceededError(
            function=function,
            to=to,
            outcome=Outcome.NOT_EXECUTED,
            timeout_s=deadline.allowed_s,
        ) from error


async def _take_by(inflow: Inflow, deadline: Deadline | None) -> Any:
    """Take the next item, before the deadline."""
    if deadline is None:
        return await inflow.take()
    try:
        async with asyncio.timeout_at(deadline.at_s):
            return await inflow.take()
    except TimeoutError as error:
        if isinstance(error, CallError):  # the producer's own, or the peer's deadline
            raise
        raise DeadlineExceededError(
            function=inflow.function,
            to=inflow.to,
            outcome=Outcome.UNKNOWN,
            timeout_s=deadline.allowed_s,
        ) from error


def serve(
    inbound: InboundCall, target: Target, args: list[Any], kwargs: dict[str, Any]
) -> None:
    """Run a generator and send what it yields."""
    options = inbound.link.worker.options
    inbound.target = target
    inbound.credit = Credit(options.stream_items_max, options.stream_bytes_max)
    if target.mode is Mode.ASYNC_GENERATOR:
        source = target.function(*args, **kwargs)
    else:
        source = _Steps(inbound, target.function, args, kwargs)
    inbound.start_stream(_produce(inbound, source))


async def _produce(inbound: InboundCall, source: Any) -> None:
    """Send the items of `source` as credit allows."""
    link, credit, sent = inbound.link, inbound.credit, 0
    try:
        async with aclosing(source):
            async for item in source:
                await credit.wait()
                await link.connection.writable()
                credit.spend(link.send_item(inbound, sent, item))
                sent += 1
    except asyncio.CancelledError as error:
        inbound.on_cancelled(error, items=sent)
    except BaseException as error:  # noqa: BLE001  (the consumer gets it)
        link.answer_error(inbound, error, items=sent)
    else:
        link.end_stream(inbound, sent)


class _Steps:
    """The items of a plain generator, which is stepped in threads of the pool.

    No asynchronous generator: one ends, and says so in words of its own, when what it
    steps raises GeneratorExit.
    """

    __slots__ = ("_args", "_function", "_generator", "_inbound", "_kwargs", "_step")

    def __init__(
        self,
        inbound: InboundCall,
        function: Callable[..., Any],
        args: list[Any],
        kwargs: dict[str, Any],
    ) -> None:
        self._inbound = inbound
        self._function = function
        self._args = args
        self._kwargs = kwargs
        self._generator: Any = None
        self._step: asyncio.Future[Any] | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        self._step = self._in_thread(self._next)
        item = await asyncio.shield(self._step)
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
        context = self._inbound.context.copy()
        return self._inbound.link.worker.run_in_thread(lambda: context.run(job))

    def _next(self) -> Any:
        if self._generator is None:
            self._generator = self._function(*self._args, **self._kwargs)
        try:
            return next(self._generator, _END)
        except StopAsyncIteration as error:  # it would end the stream as if in order
            raise RuntimeError("generator raised StopAsyncIteration") from error

    def _close(self) -> None:
        if self._generator is not None:
            self._generator.close()
