"""A websocket that is answered by a stream, in aiohttp and ASGI alike.

One task reads the messages of the client into a bounded queue; the handler's own task
writes the items.  An item is written before the next one is requested, and a write
waits while the client does not read.  While the queue is full, nothing is read, so a
client that sends too much waits as well.

Source: RFC 6455, "The WebSocket Protocol".
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Callable,
    Collection,
    Sequence,
)
from dataclasses import dataclass
from typing import Any, Final, Protocol, Self, TypeAlias

from asyncrpc.core.arguments import wrong
from asyncrpc.serving.event_sender import closed, failure_of, source_of
from asyncrpc.serving.machine.error_answers import NORMAL_CLOSURE
from asyncrpc.serving.machine.server_sent_events import as_json, check_sendable
from asyncrpc.serving.request_scope import (
    ClientLeftError,
    ClientScope,
    beside,
    until_deadline,
)

logger = logging.getLogger("asyncrpc")

MESSAGES_MAX: Final = 16  # as many items as a stream runs ahead
SocketData: TypeAlias = str | bytes
# Items; or a function of the client's messages that returns them.
SocketSource: TypeAlias = (
    AsyncIterable[Any] | Callable[["SocketMessages"], AsyncIterable[Any]]
)
EncodeFrame: TypeAlias = Callable[[Any], SocketData]


class SocketChannel(Protocol):
    """A websocket that has been accepted."""

    async def receive(self) -> SocketData | None:
        """Return the next message of the client; None: it has left."""

    async def send(self, data: SocketData) -> None:
        """Send a message; wait while the client does not read."""


@dataclass(frozen=True, slots=True)
class SocketClosure:
    """How the server closes a websocket."""

    code: int = NORMAL_CLOSURE
    reason: str = ""


class SocketMessages(AsyncIterator[SocketData]):
    """What the client of a websocket sends: text as `str`, binary data as `bytes`.

    It does not end: when the client leaves, its reader is cancelled.
    """

    def __init__(self, messages_max: int) -> None:
        """Begin with no message.

        Args:
            messages_max: messages that are held; the client waits to send more.
        """
        self._queue = asyncio.Queue[SocketData](messages_max)

    async def put(self, message: SocketData) -> None:
        """Add a message; wait for room."""
        await self._queue.put(message)

    def __aiter__(self) -> Self:
        """Return itself."""
        return self

    async def __anext__(self) -> SocketData:
        """Wait for the next message, and return it."""
        return await self._queue.get()


def as_frame(value: Any) -> SocketData:
    """Return a value as a message: bytes as binary data, all else as JSON."""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    return as_json(value)


def protocols_for(offered: Collection[str], spoken: Sequence[str]) -> tuple[str, ...]:
    """Return the subprotocol of a websocket: the best one that both sides speak."""
    return tuple(protocol for protocol in spoken if protocol in offered)[:1]


async def run_exchange(
    channel: SocketChannel,
    source: SocketSource,
    *,
    encode: EncodeFrame = as_frame,
    messages_max: int = MESSAGES_MAX,
) -> SocketClosure | None:
    """Answer the messages of a client by a stream, to its end."""
    messages = SocketMessages(messages_max)
    is_heard = not isinstance(source, AsyncIterable)
    scope = ClientScope()
    async with scope, beside(_read(channel, messages if is_heard else None, scope)):
        try:
            items = source_of(source, messages, "websocket_response")
            await _write(channel, items, encode)
        except ClientLeftError:
            return None
        except Exception as error:  # noqa: BLE001  (the client is told)
            answer = failure_of(error)
            return SocketClosure(answer.close_code, answer.reason)
        return SocketClosure()
    return None


async def _write(
    channel: SocketChannel, items: AsyncIterable[Any], encode: EncodeFrame
) -> None:
    async with closed(items) as stream, until_deadline():
        async for item in stream:
            data = encode(item)
            if isinstance(data, str):
                check_sendable(data)
            elif not isinstance(data, bytes):
                raise wrong("what encode returns", "a string or bytes", data)
            await channel.send(data)


async def _read(
    channel: SocketChannel, messages: SocketMessages | None, scope: ClientScope
) -> None:
    """Read until the client leaves; drop its messages if nothing takes them."""
    try:
        while (message := await channel.receive()) is not None:
            if messages is not None:
                await messages.put(message)
    except Exception as error:  # noqa: BLE001  (whatever the server makes of it)
        logger.debug("a websocket ends: %r", error)
    scope.leave()
