"""How the doors of web applications are used: responses, middleware, lifespans."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

import aiohttp
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from asyncrpc import UsageError, serving
from asyncrpc.serving import asgi
from tests.integration.misuse.uses_values import CALLABLES, FLAG
from tests.integration.misuse.using import ANYTHING, Use, nothing
from tests.integration.misuse.wrong import SECONDS, World

_TEXT: Final = {"text", "text with a surrogate", "too large"}
_COUNTS: Final = {"an integer", "an integer of 70 bits"}
_DURATIONS: Final = SECONDS - {"none"}
_WORKERS: Final = {"an ended worker", "another worker"}
_CALLABLES: Final = CALLABLES | {"a local function", "raises in everything"}
_EVENT_OPTIONS: Final[Mapping[str, set[str]]] = {
    "stream": _CALLABLES,
    "encode": _CALLABLES,
    "end_event": _TEXT | {"empty text"},
    "keep_alive_s": SECONDS,
    "begin_within_s": _DURATIONS,
    "headers": {"none"},
}
_SOCKET_OPTIONS: Final[Mapping[str, set[str]]] = {
    "stream": _CALLABLES,
    "encode": _CALLABLES,
    "messages_max": _COUNTS,
    "protocols": {"an empty list", "a list of text"},
}


async def _numbers() -> AsyncIterator[int]:
    yield 1


async def _application(scope: Any, receive: Any, send: Any) -> None:
    """Be an application of ASGI that nobody asks."""


async def _get(handler: Any, *, upgrade: bool = False) -> bytes:
    """Serve a handler, and ask it."""
    app = web.Application()
    app.router.add_get("/", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
        async with aiohttp.ClientSession() as client:
            if upgrade:
                async with client.ws_connect(url) as websocket:
                    return (await websocket.receive_str()).encode()
            async with client.get(url) as response:
                return await response.read()
    finally:
        await runner.cleanup()


async def _use_events(_: World) -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        return await serving.sse_response(request, _numbers())

    assert await _get(handle) == b"data: 1\n\n"


async def _use_socket(_: World) -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        return await serving.websocket_response(request, _numbers())

    assert await _get(handle, upgrade=True) == b"1"


def _websocket(sent: list[Any] | None = None) -> asgi.AsgiWebSocket:
    """Return a websocket whose client comes and says nothing."""
    waiting = [{"type": "websocket.connect"}]

    async def receive() -> Any:
        if waiting:
            return waiting.pop()
        return await asyncio.get_running_loop().create_future()

    async def send(message: Any) -> None:
        if sent is not None:
            sent.append(message)

    return asgi.AsgiWebSocket({"type": "websocket"}, receive, send)


async def _use_asgi_socket(_: World) -> None:
    sent: list[Any] = []
    await asgi.websocket_response(_websocket(sent), _numbers())
    kinds = [event["type"] for event in sent]
    assert kinds == ["websocket.accept", "websocket.send", "websocket.close"]


async def _start_and_end(lifespan: Any) -> None:
    """Enter what a lifespan makes for an application."""
    async with lifespan(None):
        pass


USES: Final[Mapping[str, Use]] = {
    "serving.ServerSentEvent": Use(
        lambda _: serving.ServerSentEvent,
        needs_worker=False,
        fits={
            "data": ANYTHING,
            "event": _TEXT | {"empty text"},
            "id": _TEXT | {"empty text"},
            "retry_s": SECONDS,
        },
    ),
    "serving.sse_response": Use(
        lambda _: serving.sse_response,
        needs_worker=False,
        right={
            "request": lambda _: make_mocked_request("GET", "/"),
            "stream": lambda _: _numbers(),
        },
        fits=_EVENT_OPTIONS,
        rightly=_use_events,
    ),
    "serving.websocket_response": Use(
        lambda _: serving.websocket_response,
        needs_worker=False,
        right={
            "request": lambda _: make_mocked_request("GET", "/"),
            "stream": lambda _: _numbers(),
        },
        fits={**_SOCKET_OPTIONS, "message_bytes_max": _COUNTS, "heartbeat_s": SECONDS},
        # The request asks for no websocket: the client's fault.
        refusals=(UsageError, web.HTTPBadRequest),
        rightly=_use_socket,
    ),
    "serving.asgi.sse_response": Use(
        lambda _: asgi.sse_response,
        needs_worker=False,
        right={"stream": lambda _: _numbers()},
        fits=_EVENT_OPTIONS,
        finish=nothing,
    ),
    "serving.asgi.AsgiWebSocket": Use(
        lambda _: asgi.AsgiWebSocket,
        needs_worker=False,
        right={
            "scope": lambda _: {"type": "websocket"},
            "receive": lambda _: nothing,
            "send": lambda _: nothing,
        },
        fits={"receive": _CALLABLES, "send": _CALLABLES},
    ),
    "serving.asgi.websocket_response": Use(
        lambda _: asgi.websocket_response,
        needs_worker=False,
        right={"websocket": lambda _: _websocket(), "stream": lambda _: _numbers()},
        fits=_SOCKET_OPTIONS,
        rightly=_use_asgi_socket,
    ),
    "serving.asgi.lifespan": Use(
        lambda _: asgi.lifespan,
        needs_worker=False,
        right={"worker": lambda world: world.a},
        fits={"worker": _WORKERS | _CALLABLES, "key": _TEXT},
        finish=_start_and_end,
    ),
    "serving.asgi.health_app": Use(
        lambda _: asgi.health_app,
        needs_worker=False,
        fits={"keys": _TEXT},
        finish=nothing,
    ),
    "serving.asgi.WorkerMiddleware": Use(
        lambda _: asgi.WorkerMiddleware,
        needs_worker=False,
        right={"app": lambda _: _application},
        fits={
            "app": _CALLABLES,
            "worker": _WORKERS | _CALLABLES | {"none"},
            "timeout_s": SECONDS,
            "retry_after_s": _DURATIONS,
            "deadline_header": {"none", "text"},
            "handler_cancellation": FLAG,
            "key": _TEXT,
        },
        finish=nothing,
    ),
}
