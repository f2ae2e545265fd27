"""The neutral application, made for aiohttp, Starlette, FastAPI and bare ASGI."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.websockets import WebSocket

from asyncrpc import serving
from asyncrpc.serving import asgi
from asyncrpc.serving.asgi.machine.connection import (
    AsgiApplication,
    AsgiReceive,
    AsgiScope,
    AsgiSend,
    send_response,
)
from tests.integration.serving.doors.neutral import Asked, NeutralApp

# --- aiohttp -------------------------------------------------------------------------


@dataclass
class AiohttpAsked:
    request: web.Request
    response: web.StreamResponse | None = None

    async def body(self) -> bytes:
        body: bytes = await self.request.read()
        return body

    async def begin(self, data: bytes) -> Callable[[bytes], Awaitable[None]]:
        self.response = web.StreamResponse()
        await self.response.prepare(self.request)
        await self.response.write(data)
        return self.response.write


def aiohttp_app(neutral: NeutralApp) -> web.Application:
    app = web.Application(middlewares=[serving.middleware(**neutral.options)])
    app.cleanup_ctx.append(serving.worker_context(neutral.worker))
    app.add_routes(serving.health_routes())
    for path, answer in neutral.answers.items():

        async def handle(request: web.Request, answer: Any = answer) -> Any:
            asked = AiohttpAsked(request)
            result = await answer(asked)
            return asked.response or web.json_response(result)

        app.router.add_get(path, handle)
        app.router.add_post(path, handle)
    for path, source in neutral.events.items():

        async def handle_events(request: web.Request, source: Any = source) -> Any:
            return await serving.sse_response(request, source, **neutral.event_options)

        app.router.add_get(path, handle_events)
    for path, source in neutral.sockets.items():

        async def handle_socket(request: web.Request, source: Any = source) -> Any:
            return await serving.websocket_response(
                request, source, **neutral.socket_options
            )

        app.router.add_get(path, handle_socket)
    return app


# --- ASGI ----------------------------------------------------------------------------


@dataclass
class AsgiAsked:
    """What Starlette, FastAPI and a bare application are asked."""

    scope: AsgiScope
    receive: AsgiReceive
    send: AsgiSend
    has_begun: bool = False

    async def body(self) -> bytes:
        body = b""
        while True:
            message = await self.receive()
            assert message["type"] == "http.request"
            body += message.get("body", b"")
            if not message.get("more_body"):
                return bytes(body)

    async def begin(self, data: bytes) -> Callable[[bytes], Awaitable[None]]:
        self.has_begun = True
        start = {"type": "http.response.start", "status": 200, "headers": []}
        await self.send(start)
        await self.write(data)
        return self.write

    async def write(self, data: bytes) -> None:
        body = {"type": "http.response.body", "body": data, "more_body": True}
        await self.send(body)


class _Answer:
    """An ASGI application that answers by a function of the neutral application."""

    def __init__(self, answer: Callable[[Asked], Awaitable[Any]]) -> None:
        self.answer = answer

    async def __call__(
        self, scope: AsgiScope, receive: AsgiReceive, send: AsgiSend
    ) -> None:
        asked = AsgiAsked(scope, receive, send)
        body = json.dumps(await self.answer(asked)).encode()
        if asked.has_begun:
            await send({"type": "http.response.body", "body": b""})
        else:
            headers = {"Content-Type": "application/json"}
            await send_response(send, 200, headers, body, prefix="")


def bare_app(neutral: NeutralApp) -> AsgiApplication:
    """Return an application that knows no framework and no lifespan."""
    health = asgi.health_app()

    async def app(scope: AsgiScope, receive: AsgiReceive, send: AsgiSend) -> None:
        assert scope["type"] in {"http", "websocket"}  # it has no lifespan
        path = scope["path"]
        if path in neutral.answers:
            await _Answer(neutral.answers[path])(scope, receive, send)
        elif path in neutral.events:
            response = asgi.sse_response(neutral.events[path], **neutral.event_options)
            await response(scope, receive, send)
        elif path in neutral.sockets:
            websocket = asgi.AsgiWebSocket(scope, receive, send)
            await asgi.websocket_response(
                websocket, neutral.sockets[path], **neutral.socket_options
            )
        else:
            await health(scope, receive, send)

    return asgi.WorkerMiddleware(app, neutral.worker, **neutral.options)


def starlette_app(neutral: NeutralApp) -> AsgiApplication:
    app = Starlette(lifespan=asgi.lifespan(neutral.worker))
    app.add_middleware(asgi.WorkerMiddleware, **neutral.options)
    health = asgi.health_app()
    app.add_route("/healthz", health)  # type: ignore[arg-type]
    app.add_route("/readyz", health)  # type: ignore[arg-type]
    for path, answer in neutral.answers.items():
        app.add_route(path, _Answer(answer), methods=["GET", "POST"])  # type: ignore[arg-type]
    for path, source in neutral.events.items():

        async def handle_events(_: Request, source: Any = source) -> Any:
            return asgi.sse_response(source, **neutral.event_options)

        app.add_route(path, handle_events)
    _add_sockets(app, neutral)
    return app


def fastapi_app(neutral: NeutralApp) -> AsgiApplication:
    app = FastAPI(lifespan=asgi.lifespan(neutral.worker))
    app.add_middleware(asgi.WorkerMiddleware, **neutral.options)
    app.mount("/health", asgi.health_app())
    app.add_route("/healthz", health := asgi.health_app())  # type: ignore[arg-type]
    app.add_route("/readyz", health)  # type: ignore[arg-type]
    for path, answer in neutral.answers.items():

        async def handle(request: Request) -> Any:
            answer = neutral.answers[request.scope["path"]]
            scope, receive, send = request.scope, request.receive, request._send  # noqa: SLF001
            asked = AsgiAsked(scope, receive, send)
            result = await answer(asked)
            if not asked.has_begun:
                return JSONResponse(result)
            await send({"type": "http.response.body", "body": b""})
            raise AssertionError("it has been answered")

        del answer
        app.add_api_route(path, handle, methods=["GET", "POST"])
    for path in neutral.events:

        async def handle_events(request: Request) -> Any:
            source = neutral.events[request.scope["path"]]
            return asgi.sse_response(source, **neutral.event_options)

        app.add_api_route(path, handle_events)
    _add_sockets(app, neutral)
    return app


def _add_sockets(app: Starlette, neutral: NeutralApp) -> None:
    for path in neutral.sockets:

        async def handle(websocket: WebSocket) -> None:
            source = neutral.sockets[websocket.scope["path"]]
            await asgi.websocket_response(websocket, source, **neutral.socket_options)

        app.router.add_websocket_route(path, handle)
