"""Streams: the values of a generator on another worker, one by one, with credit.

The producer runs ahead of its consumer by at most `Options.stream_items_max` items and
about `stream_bytes_max` bytes; the consumer gives credit as it takes items.  Large
items may overtake small ones on the wire, so items are numbered and put in order.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final

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
        await self._room.wait()


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
            await self._arrived.wait()
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
        source = _in_threads(inbound, target.function, args, kwargs)
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
        if inbound.is_cancelled:
            link.forget(inbound)
        else:
            link.answer_error(inbound, error, items=sent)
    except BaseException as error:  # noqa: BLE001  (the consumer gets it)
        link.answer_error(inbound, error, items=sent)
    else:
        link.end_stream(inbound, sent)


async def _in_threads(
    inbound: InboundCall,
    function: Callable[..., Any],
    args: list[Any],
    kwargs: dict[str, Any],
) -> AsyncIterator[Any]:
    """Step a plain generator in threads of the pool."""

    def in_thread(job: Callable[[], Any]) -> asyncio.Future[Any]:
        context = inbound.context.copy()
        return inbound.link.worker.run_in_thread(lambda: context.run(job))

    generator = await in_thread(lambda: function(*args, **kwargs))
    step = in_thread(lambda: next(generator, _END))
    try:
        while (item := await asyncio.shield(step)) is not _END:
            yield item
            step = in_thread(lambda: next(generator, _END))
    finally:
        # A step cannot be interrupted, and a generator that runs cannot be closed.
        await asyncio.gather(step, return_exceptions=True)
        await in_thread(generator.close)
