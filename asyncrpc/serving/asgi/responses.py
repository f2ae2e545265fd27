"""Streams to browsers by ASGI: server-sent events, and websockets.

A client that leaves is noticed at once, with and without `WorkerMiddleware`.

Source: the ASGI specification 3.0, "HTTP & WebSocket ASGI Message Format".
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol

from asyncrpc.core.arguments import check_callable, check_count, check_texts, wrong
from asyncrpc.core.loop.loops import loop_for
from asyncrpc.serving.asgi.machine.connection import (
    WATCHED_KEY,
    AsgiMessage,
    AsgiReceive,
    AsgiScope,
    AsgiSend,
    header_values,
)
from asyncrpc.serving.event_sender import (
    BEGIN_WITHIN_S,
    KEEP_ALIVE_S,
    EventOptions,
    EventSender,
    EventSource,
    check_source,
    source_of,
)
from asyncrpc.serving.machine import server_sent_events as sse
from asyncrpc.serving.machine.error_answers import CLIENT_LEFT_STATUS
from asyncrpc.serving.request_scope import ClientLeftError, ClientScope, beside
from asyncrpc.serving.socket_exchange import (
    MESSAGES_MAX,
    EncodeFrame,
    SocketData,
    SocketSource,
    as_frame,
    protocols_for,
    run_exchange,
)

_LAST_EVENT_ID = "last-event-id"


class WebSocketLike(Protocol):
    """A websocket of an ASGI application, such as Starlette's `WebSocket`."""

    @property
    def scope(self) -> Any:
        """The scope of the connection."""

    async def receive(self) -> AsgiMessage:
        """Return the next message of the server."""

    async def send(self, message: AsgiMessage) -> None:
        """Send a message to the server."""


class AsgiWebSocket:
    """A websocket of a bare ASGI application, for `websocket_response`.

    Example:
        >>> async def app(scope, receive, send):
        ...     websocket = asgi.AsgiWebSocket(scope, receive, send)
        ...     await asgi.websocket_response(websocket, answer)
    """

    def __init__(self, scope: AsgiScope, receive: AsgiReceive, send: AsgiSend) -> None:
        """Wrap the arguments with which the application was called.

        Args:
            scope: of the connection.
            receive: of the server.
            send: of the server.

        Raises:
            UsageError: an argument has the wrong type.
        """
        if not isinstance(scope, Mapping) or scope.get("type") != "websocket":
            raise wrong("scope", "the scope of a websocket", scope)
        check_callable("receive", receive)
        check_callable("send", send)
        self.scope = scope
        self._receive = receive
        self._send = send

    async def receive(self) -> AsgiMessage:
        """Return the next message of the server.

        Raises:
            Exception: what the server raises.

        Cancellation:
            As the server defines.
        """
        return await self._receive()

    async def send(self, message: AsgiMessage) -> None:
        """Send a message to the server.

        Args:
            message: of ASGI.

        Raises:
            Exception: what the server raises.

        Cancellation:
            It may have been sent.
        """
        await self._send(message)


class EventStreamApplication:
    """An ASGI application that answers any request by one stream of events.

    Attributes:
        raw_headers: of the response, as ASGI has them; a framework may change them.
    """

    def __init__(
        self, stream: EventSource, options: EventOptions, headers: Mapping[str, str]
    ) -> None:
        self.raw_headers = [
            (name.lower().encode("latin-1"), value.encode("latin-1"))
            for name, value in headers.items()
        ]
        self._stream = stream
        self._options = options

    async def __call__(
        self, scope: AsgiScope, receive: AsgiReceive, send: AsgiSend
    ) -> None:
        """Answer a request; a server or a framework calls it."""
        channel = _AsgiEvents(send, self.raw_headers)
        sender = EventSender(channel, self._options)
        async with _until_left(scope, receive) as client:
            with suppress(ClientLeftError):  # no answer can be sent
                if scope["method"] == "HEAD":
                    await sender.send_head()
                else:
                    last = "".join(header_values(scope, _LAST_EVENT_ID)[:1])
                    await sender.send_all(source_of(self._stream, last))
                await channel.end()
        if client.has_left and not sender.has_begun:
            with suppress(ClientLeftError):
                await channel.answer_nobody()


def sse_response(
    stream: EventSource,
    *,
    encode: sse.Encode = sse.as_json,
    end_event: str = "",
    keep_alive_s: float | None = KEEP_ALIVE_S,
    begin_within_s: float = BEGIN_WITHIN_S,
    headers: Mapping[str, str] | None = None,
) -> Any:
    """Return a response that sends a stream as server-sent events.

    It sends the same as `serving.sse_response`: each item is the data of an event, and
    is written before the next item is requested.  An error is an event `error`, or is
    raised if it comes before anything was sent.

    Args:
        stream: items, such as `Peer.stream(...)` returns; or a function that returns
            them, given the `Last-Event-ID` of the client, empty if it sent none.
        encode: makes the text of an item's data; JSON by default.
        end_event: type of an event after a complete stream; empty: none.
        keep_alive_s: seconds of silence after which a comment is sent; None: never.
        begin_within_s: seconds after which the response begins even without an item;
            an earlier error is answered with its own status.
        headers: of the response, in addition to those of an event stream.

    Returns:
        A `starlette.responses.Response` where Starlette is installed: return it from a
        handler of Starlette or FastAPI.  It is an ASGI application everywhere:
        `await response(scope, receive, send)`.

    Raises:
        UsageError: an argument has the wrong type, or is out of range.

    Example:
        >>> @app.get("/tokens")
        ... async def get_tokens(prompt: str):
        ...     peer = asyncrpc.current_worker().peer("model")
        ...     return asgi.sse_response(peer.stream(generate, prompt))

    Source: the HTML standard, "Server-sent events".
    """
    check_source("stream", stream)
    options = EventOptions.checked(encode, end_event, keep_alive_s, begin_within_s)
    all_headers = {**sse.HEADERS, **sse.checked_headers(headers)}
    application = EventStreamApplication(stream, options, all_headers)
    try:
        from asyncrpc.serving.asgi.starlette_response import (  # noqa: PLC0415
            StarletteResponse,
        )
    except ImportError:  # without Starlette no handler needs to return its class
        return application
    return StarletteResponse(application)


async def websocket_response(
    websocket: WebSocketLike,
    stream: SocketSource,
    *,
    encode: EncodeFrame = as_frame,
    messages_max: int = MESSAGES_MAX,
    protocols: Sequence[str] = (),
) -> None:
    """Accept a websocket, unless it is accepted already, and answer it by a stream.

    It works like `serving.websocket_response`.  Pings, and the largest message that a
    client may send, are options of the server.

    Args:
        websocket: Starlette's or FastAPI's, or an `AsgiWebSocket`.
        stream: items, such as `Peer.stream(...)` returns, if the messages of the client
            are ignored; or a function that returns them, given an asynchronous iterator
            of the messages, `str` or `bytes`.
        encode: makes a message of an item: text of `str`, binary data of `bytes`.  By
            default bytes are sent unchanged, everything else as JSON.
        messages_max: unread messages of the client; with this many, no more are
            received.
        protocols: subprotocols that the application speaks, the best one first.

    Raises:
        UsageError: an argument has the wrong type, or is out of range.

    Cancellation:
        The stream is closed: its generator's `finally` runs, wherever that is.

    Example:
        >>> @app.websocket("/chat")
        ... async def chat(websocket: WebSocket) -> None:
        ...     await asgi.websocket_response(websocket, answer)

    Source: RFC 6455.
    """
    if not all(hasattr(type(websocket), name) for name in ("receive", "send")):
        raise wrong("websocket", "a websocket of ASGI or Starlette", websocket)
    loop_for("websocket_response")
    check_source("stream", stream)
    check_callable("encode", encode)
    check_count("messages_max", messages_max, at_least=1)
    check_texts("protocols", protocols)
    channel = _AsgiSocket(websocket)
    if not await channel.accepted(protocols):
        return
    closure = await run_exchange(
        channel, stream, encode=encode, messages_max=messages_max
    )
    if closure is not None:
        await channel.close(closure.code, closure.reason)


class _AsgiEvents:
    """Takes the bytes of a stream of events."""

    def __init__(self, send: AsgiSend, headers: list[tuple[bytes, bytes]]) -> None:
        self._send = send
        self._headers = headers

    async def begin(self) -> None:
        start = {"status": 200, "headers": self._headers}
        await self._send_unless_left({"type": "http.response.start", **start})

    async def answer_nobody(self) -> None:
        """Answer a client that has left; see `WatchedConnection.answer_nobody`."""
        start = {"status": CLIENT_LEFT_STATUS, "headers": []}
        await self._send_unless_left({"type": "http.response.start", **start})
        await self.end()

    async def write(self, data: bytes) -> None:
        body = {"body": data, "more_body": True}
        await self._send_unless_left({"type": "http.response.body", **body})

    async def end(self) -> None:
        await self._send_unless_left({"type": "http.response.body", "body": b""})

    async def _send_unless_left(self, message: AsgiMessage) -> None:
        try:
            await self._send(message)
        except OSError as error:  # as of ASGI 2.4, when the client has left
            raise ClientLeftError from error


class _AsgiSocket:
    """A websocket of ASGI."""

    def __init__(self, websocket: WebSocketLike) -> None:
        self._websocket = websocket

    async def accepted(self, protocols: Sequence[str]) -> bool:
        """Accept the websocket; return whether its client is still there."""
        state = getattr(self._websocket, "application_state", None)
        if getattr(state, "name", "") == "CONNECTED":
            return True  # the handler has accepted it
        message = await self._websocket.receive()
        if message["type"] != "websocket.connect":
            return False
        offered = self._websocket.scope.get("subprotocols", ())
        chosen = "".join(protocols_for(offered, protocols)) or None
        accepting: dict[str, Any] = {"subprotocol": chosen, "headers": []}
        await self._websocket.send({"type": "websocket.accept", **accepting})
        return True

    async def receive(self) -> SocketData | None:
        message = await self._websocket.receive()
        if message["type"] != "websocket.receive":
            return None
        text = message.get("text")
        content: SocketData = message["bytes"] if text is None else text
        return content

    async def send(self, data: SocketData) -> None:
        key = "text" if isinstance(data, str) else "bytes"
        try:
            await self._websocket.send({"type": "websocket.send", key: data})
        except Exception as error:
            if _says_left(error):
                raise ClientLeftError from error
            raise

    async def close(self, code: int, reason: str) -> None:
        closing = {"code": code, "reason": reason}
        try:
            await self._websocket.send({"type": "websocket.close", **closing})
        except Exception as error:
            if not _says_left(error):
                raise


def _says_left(error: Exception) -> bool:
    """Return whether an error of a server or Starlette means that the client left."""
    return isinstance(error, OSError) or type(error).__name__ == "WebSocketDisconnect"


@asynccontextmanager
async def _until_left(
    scope: AsgiScope, receive: AsgiReceive
) -> AsyncIterator[ClientScope]:
    """Cancel a block when the client leaves, unless the middleware does."""
    client = ClientScope()
    if scope.get(WATCHED_KEY):
        yield client
        return
    async with client, beside(_watch(receive, client)):
        yield client


async def _watch(receive: AsgiReceive, client: ClientScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass  # parts of the body, which are no longer read
    client.leave()
