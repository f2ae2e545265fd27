"""A stream of items as server-sent events, in aiohttp and ASGI alike.

The response begins with the first item, or earlier if that is slow to come.  So a
stream that is refused at once is answered with its own status, like any request; a
later error is the last event, `error`.

Each item is written before the next one is requested, and a write waits while the
client does not read: the credit of `Peer.stream` extends to the browser.

Source: the HTML standard, "Server-sent events".
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterable, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol, Self, TypeAlias, TypeVar

from asyncrpc.core.arguments import check_callable, check_duration, wrong
from asyncrpc.core.calls.context import current_worker_var
from asyncrpc.errors import UsageError
from asyncrpc.serving.machine import server_sent_events as sse
from asyncrpc.serving.machine.error_answers import INTERNAL, ErrorAnswer, answer_to
from asyncrpc.serving.request_scope import (
    ClientLeftError,
    ClientScope,
    beside,
    is_over,
    until_deadline,
)

G = TypeVar("G")

logger = logging.getLogger("asyncrpc")

KEEP_ALIVE_S: Final = 15.0  # proxies close connections that are silent for 30 or 60 s
BEGIN_WITHIN_S: Final = 1.0  # a refusal comes within milliseconds

# Items; or a function that returns them, given the `Last-Event-ID` of the browser.
EventSource: TypeAlias = AsyncIterable[Any] | Callable[[str], AsyncIterable[Any]]


class EventChannel(Protocol):
    """A response that takes the bytes of a stream."""

    async def begin(self) -> None:
        """Send the status and the headers."""

    async def write(self, data: bytes) -> None:
        """Send bytes; wait while the client does not read."""


@dataclass(frozen=True, slots=True)
class EventOptions:
    """How items become events.

    Attributes:
        encode: makes the text of an item's data.
        end_event: type of an event that ends a complete stream; empty: none.
        keep_alive_s: seconds of silence after which a comment is sent; None: never.
        begin_within_s: seconds after which the response begins without an item.
    """

    encode: sse.Encode = sse.as_json
    end_event: str = ""
    keep_alive_s: float | None = KEEP_ALIVE_S
    begin_within_s: float = BEGIN_WITHIN_S

    @classmethod
    def checked(
        cls,
        encode: sse.Encode,
        end_event: str,
        keep_alive_s: float | None,
        begin_within_s: float,
    ) -> Self:
        """Return the checked options of a program."""
        check_callable("encode", encode)
        sse.check_line("end_event", end_event)
        sse.check_period("keep_alive_s", keep_alive_s)
        check_duration("begin_within_s", begin_within_s)
        return cls(encode, end_event, keep_alive_s, begin_within_s)


class EventSender:
    """Sends the events of one response, one after the other.

    Attributes:
        has_begun: whether the client has been sent a status.
    """

    def __init__(self, channel: EventChannel, options: EventOptions) -> None:
        self.has_begun = False
        self._channel = channel
        self._options = options
        self._turn = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._sent_s = self._loop.time()

    async def send_all(self, items: AsyncIterable[Any]) -> None:
        """Send a stream to its end, which may be an error."""
        client = ClientScope()
        async with client, beside(self._keep_alive(client)), closed(items) as stream:
            await self._send_items(stream)
        if client.has_left:
            raise ClientLeftError

    async def send_head(self) -> None:
        """Answer a request that only wants the head of the response."""
        await self._send(b"")

    async def _send_items(self, items: AsyncIterator[Any]) -> None:
        try:
            async with until_deadline():
                async for item in items:
                    await self._send(sse.encoded(item, self._options.encode))
        except Exception as error:
            if not self.has_begun or isinstance(error, ClientLeftError):
                raise
            await self._send(error_event(failure_of(error)))
            return
        name = self._options.end_event
        ending = sse.encoded(sse.ServerSentEvent(event=name)) if name else b""
        await self._send(ending)

    async def _send(self, data: bytes) -> None:
        async with self._turn:
            if not self.has_begun:
                self.has_begun = True
                await self._channel.begin()
            if data:
                await self._channel.write(data)
            self._sent_s = self._loop.time()

    async def _keep_alive(self, client: ClientScope) -> None:
        """Begin the response in time, and send comments, until the client leaves."""
        try:
            await asyncio.sleep(self._options.begin_within_s)
            if not self.has_begun:
                await self._send(sse.COMMENT)  # some servers wait for the first bytes
            await self._break_silence()
        except ClientLeftError:
            client.leave()

    async def _break_silence(self) -> None:
        every_s = self._options.keep_alive_s
        while every_s is not None:
            rest_s = self._sent_s + every_s - self._loop.time()
            if rest_s > 0:
                await asyncio.sleep(rest_s)
            else:
                await self._send(sse.COMMENT)


def failure_of(error: BaseException) -> ErrorAnswer:
    """Return the answer to an error after the response began; log the error."""
    worker = current_worker_var.get()
    answer = answer_to(
        error,
        is_over=is_over(),
        is_closed=worker is not None and worker.is_closed,
    )
    if answer is None:
        logger.error("a stream to a client failed", exc_info=error)
        return INTERNAL
    logger.warning("a stream to a client ends: %s", error)
    return answer


def error_event(answer: ErrorAnswer) -> bytes:
    """Return the event that ends a failed stream."""
    return sse.encoded(sse.ServerSentEvent(answer.body, "error"), lambda text: text)


@asynccontextmanager
async def closed(items: AsyncIterable[Any]) -> AsyncIterator[AsyncIterator[Any]]:
    """Iterate over a stream, and close it if possible: a remote `finally` runs."""
    iterator = aiter(items)
    try:
        yield iterator
    finally:
        close = getattr(iterator, "aclose", None)
        if close is not None:
            await close()


def source_of(
    stream: AsyncIterable[Any] | Callable[[G], AsyncIterable[Any]],
    argument: G,
    response: str = "sse_response",
) -> AsyncIterable[Any]:
    """Return the items of a response, or those that its function returns."""
    if isinstance(stream, AsyncIterable):
        return stream
    items = stream(argument)
    if not isinstance(items, AsyncIterable):
        if hasattr(items, "close"):
            items.close()  # a coroutine, of a function without `yield`
        raise UsageError(
            f"the function of {response} must return an asynchronous iterator, such as "
            f"Peer.stream(...), not an object of type {type(items).__name__}"
        )
    return items


def check_source(name: str, stream: object) -> None:
    """Raise UsageError unless an argument is a stream, or a function of one."""
    if not isinstance(stream, AsyncIterable) and not callable(stream):
        wanted = "an asynchronous iterator, or a function that returns one"
        raise wrong(name, wanted, stream)
