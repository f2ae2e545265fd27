"""Streams to browsers by aiohttp: server-sent events, and websockets.

A client that leaves is noticed at once if the application was started with
`handler_cancellation=True`; without it, at the next write, and at most
`keep_alive_s` later.

Source: https://docs.aiohttp.org/en/stable/web_advanced.html, "Peer disconnection".
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Final

from aiohttp import WSMsgType, web

from asyncrpc.core.arguments import (
    check_callable,
    check_count,
    check_kind,
    check_texts,
)
from asyncrpc.core.loop.loops import loop_for
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
from asyncrpc.serving.request_scope import ClientLeftError
from asyncrpc.serving.socket_exchange import (
    MESSAGES_MAX,
    EncodeFrame,
    SocketData,
    SocketSource,
    as_frame,
    protocols_for,
    run_exchange,
)

HEARTBEAT_S: Final = 20.0  # as uvicorn's
MESSAGE_BYTES_MAX: Final = 4 << 20  # aiohttp's default
LAST_EVENT_ID: Final = "Last-Event-ID"


async def sse_response(
    request: web.Request,
    stream: EventSource,
    *,
    encode: sse.Encode = sse.as_json,
    end_event: str = "",
    keep_alive_s: float | None = KEEP_ALIVE_S,
    begin_within_s: float = BEGIN_WITHIN_S,
    headers: Mapping[str, str] | None = None,
) -> web.StreamResponse:
    """Answer a request by a stream, as server-sent events.

    Each item is the data of an event; a `ServerSentEvent` also sets its other fields.
    An item is written before the next one is requested, so a client that does not read
    delays only its own generator, on whichever worker that runs.

    A stream that fails before anything was sent raises, so that `middleware` answers.
    A later error is sent as an event `error` with the data `{"error": class,
    "message": text}`, and the stream ends.

    Args:
        request: of the client.
        stream: items, such as `Peer.stream(...)` returns; or a function that returns
            them, given the `Last-Event-ID` of the client, empty if it sent none.
        encode: makes the text of an item's data; JSON by default.
        end_event: type of an event after a complete stream.  A browser connects again
            when a stream ends, unless its script closes it: this event tells the script
            to do so.  Empty: none is sent.
        keep_alive_s: seconds of silence after which a comment is sent, so that proxies
            do not close the connection; None: never.
        begin_within_s: seconds after which the response begins even without an item;
            an earlier error is answered with its own status.
        headers: of the response, in addition to those of an event stream.

    Returns:
        The response, which has been sent.

    Raises:
        UsageError: an argument has the wrong type, or is out of range; or no event
            loop runs here.
        Exception: the stream raised before anything was sent.

    Cancellation:
        The stream is closed: its generator's `finally` runs, wherever that is.

    Example:
        >>> async def get_tokens(request: web.Request) -> web.StreamResponse:
        ...     peer = asyncrpc.current_worker().peer("model")
        ...     return await serving.sse_response(request, peer.stream(generate, "Hi"))

    Source: the HTML standard, "Server-sent events".
    """
    loop_for("sse_response")
    check_kind("request", request, web.Request, "a web.Request")
    check_source("stream", stream)
    options = EventOptions.checked(encode, end_event, keep_alive_s, begin_within_s)
    response = web.StreamResponse(headers=sse.HEADERS)
    response.headers.update(sse.checked_headers(headers))
    sender = EventSender(_AiohttpEvents(request, response), options)
    with contextlib.suppress(ClientLeftError):  # no answer can be sent
        if request.method == "HEAD":
            await sender.send_head()
        else:
            last_event_id = request.headers.get(LAST_EVENT_ID, "")
            await sender.send_all(source_of(stream, last_event_id))
    return response


async def websocket_response(
    request: web.Request,
    stream: SocketSource,
    *,
    encode: EncodeFrame = as_frame,
    messages_max: int = MESSAGES_MAX,
    protocols: Sequence[str] = (),
    message_bytes_max: int = MESSAGE_BYTES_MAX,
    heartbeat_s: float | None = HEARTBEAT_S,
) -> web.WebSocketResponse:
    """Accept a websocket, and answer it by a stream.

    An item is written before the next one is requested, so a client that does not read
    delays only its own generator.  When the stream ends, the
    websocket is closed with code 1000; when it fails, with the code of its error: 4504
    (the deadline passed), 1013 (try again later), or 1011.

    Args:
        request: of the client.
        stream: items, such as `Peer.stream(...)` returns, if the messages of the client
            are ignored; or a function that returns them, given an asynchronous iterator
            of the messages, `str` or `bytes`.
        encode: makes a message of an item: text of `str`, binary data of `bytes`.  By
            default bytes are sent unchanged, everything else as JSON.
        messages_max: unread messages of the client; with this many, no more are
            received.
        protocols: subprotocols that the server speaks, the best one first.
        message_bytes_max: bytes of a message of the client; a larger one closes the
            websocket with code 1009.
        heartbeat_s: seconds between two pings; a client that does not answer has left.
            None: none are sent.

    Returns:
        The response, which has been sent and closed.

    Raises:
        UsageError: an argument has the wrong type, or is out of range.

    Cancellation:
        The stream is closed: its generator's `finally` runs, wherever that is.

    Example:
        >>> async def answer(messages):
        ...     async for prompt in messages:
        ...         async for token in peer.stream(generate, prompt):
        ...             yield token
        >>> async def chat(request: web.Request) -> web.StreamResponse:
        ...     return await serving.websocket_response(request, answer)

    Source: RFC 6455.
    """
    loop_for("websocket_response")
    check_kind("request", request, web.Request, "a web.Request")
    check_source("stream", stream)
    check_callable("encode", encode)
    check_count("messages_max", messages_max, at_least=1)
    check_texts("protocols", protocols)
    check_count("message_bytes_max", message_bytes_max, at_least=1)
    sse.check_period("heartbeat_s", heartbeat_s)
    named = ",".join(request.headers.getall("Sec-WebSocket-Protocol", []))
    offered = [protocol.strip() for protocol in named.split(",")]
    response = StreamingWebSocket(
        protocols=protocols_for(offered, protocols),  # else the client would choose
        max_msg_size=message_bytes_max,
        heartbeat=heartbeat_s,
    )
    await response.prepare(request)
    closure = await run_exchange(
        _AiohttpSocket(response), stream, encode=encode, messages_max=messages_max
    )
    if closure is not None:
        response.own_close_code = closure.code
        await response.close(code=closure.code, message=closure.reason.encode())
    return response


class StreamingWebSocket(web.WebSocketResponse):
    """A websocket that remembers the code with which this side closed it.

    Attributes:
        own_close_code: this code; None: the client has closed it, or has left.
            `close_code` is the client's code, even if that answers ours.
    """

    own_close_code: int | None = None


class _AiohttpEvents:
    """Takes the bytes of a stream of events."""

    def __init__(self, request: web.Request, response: web.StreamResponse) -> None:
        self._request = request
        self._response = response

    async def begin(self) -> None:
        await self._response.prepare(self._request)

    async def write(self, data: bytes) -> None:
        try:
            await self._response.write(data)
        except ConnectionError as error:
            raise ClientLeftError from error


class _AiohttpSocket:
    """A websocket of aiohttp."""

    def __init__(self, response: web.WebSocketResponse) -> None:
        self._response = response

    async def receive(self) -> SocketData | None:
        message = await self._response.receive()
        if message.type in {WSMsgType.TEXT, WSMsgType.BINARY}:
            data: SocketData = message.data
            return data
        return None

    async def send(self, data: SocketData) -> None:
        try:
            if isinstance(data, str):
                await self._response.send_str(data)
            else:
                await self._response.send_bytes(data)
        except ConnectionError as error:
            raise ClientLeftError from error
