"""Requests to applications of aiohttp and ASGI, and one trace to the last worker."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from opentelemetry import trace
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket

import asyncrpc
from asyncrpc import RejectedError, Worker, serving
from asyncrpc.errors import Outcome
from asyncrpc.serving import asgi
from asyncrpc.testing import ProcessCluster
from tests.integration.serving.conftest import serve
from tests.integration.serving.doors.servers import uvicorn_client
from tests.integration.traces import remote
from tests.integration.traces.collected import Shown, Spans
from tests.integration.traces.conftest import Trio

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
DOORS = pytest.mark.parametrize("door", ["aiohttp", "asgi"])
TRACE_ID, SPAN_ID = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331


async def ask(request: web.Request) -> web.Response:
    position = await asyncrpc.rpc_async("b", remote.here_async)
    return web.json_response({"name": request.match_info.get("name"), "at": position})


async def refuse(request: web.Request) -> web.Response:
    raise RejectedError("busy", outcome=Outcome.NOT_EXECUTED)


async def miss(request: web.Request) -> web.Response:
    raise web.HTTPNotFound


def app_of(worker: Worker, *outer: Any) -> web.Application:
    app = web.Application(middlewares=[*outer, serving.middleware()])
    app.cleanup_ctx.append(serving.worker_context(worker))
    app.router.add_get("/ask/{name}", ask)
    app.router.add_get("/refuse", refuse)
    app.router.add_get("/miss", miss)
    return app


async def asked(door: str, worker: Worker, path: str, **headers: str) -> int:
    """Ask an application of aiohttp, or of Starlette on uvicorn; return the status."""
    opened = serve(app_of(worker))
    if door == "asgi":
        opened = uvicorn_client(asgi_app_of(worker), http="h11")
    async with opened as client, client.get(path, headers=headers) as response:
        await response.read()
        return response.status


@DOORS
async def test_a_request_is_the_parent_of_its_calls(
    trio: Trio, spans: Spans, door: str
) -> None:
    """Its route is known when the framework has found it."""
    headers = {"traceparent": PARENT, "tracestate": "k=v"}
    assert await asked(door, trio[0], "/ask/x", **headers) == 200
    request = spans.single("GET /ask/{name}")
    assert (request.trace_id, request.parent_id) == (TRACE_ID, SPAN_ID)
    assert (request.kind, request.status) == ("SERVER", "UNSET")
    assert request.attributes == {
        "http.request.method": "GET",
        "http.route": "/ask/{name}",
        "url.path": "/ask/x",
        "http.response.status_code": 200,
    }
    call, _ = spans.pair("here_async")
    assert call.parent_id == request.span_id
    assert {span.tracestate for span in spans.all} == {"k=v"}


@pytest.mark.parametrize(
    ("door", "path", "status", "error"),
    [
        ("aiohttp", "/refuse", 503, "503"),
        ("aiohttp", "/miss", 404, None),
        ("asgi", "/refuse", 503, "503"),
        ("asgi", "/fail", 500, "ValueError"),
    ],
)
async def test_error_answer_sets_the_request_span(  # noqa: PLR0917
    trio: Trio, spans: Spans, door: str, path: str, status: int, error: str | None
) -> None:
    assert await asked(door, trio[0], path) == status
    request = spans.single(f"GET {path}")
    assert request.error_type == error
    assert request.status == ("UNSET" if error is None else "ERROR")
    if error is None or error.isdigit():
        assert request.attributes["http.response.status_code"] == status


async def test_requests_of_one_connection_have_traces_of_their_own(
    trio: Trio, spans: Spans
) -> None:
    async with serve(app_of(trio[0])) as client:
        async with client.get("/ask/x", headers={"traceparent": PARENT}) as response:
            await response.read()
        async with client.get("/ask/y") as response:
            await response.read()
    first, second = spans.named("GET /ask/{name}")
    assert first.trace_id == TRACE_ID
    assert (second.parent_id, second.trace_id != TRACE_ID) == (None, True)


async def test_existing_span_is_the_parent(trio: Trio, spans: Spans) -> None:
    """A middleware of the program made the span before ours."""

    @web.middleware
    async def own(
        request: web.Request, handler: Callable[[web.Request], Any]
    ) -> web.StreamResponse:
        with spans.tracer().start_as_current_span("own"):
            response: web.StreamResponse = await handler(request)
            return response

    async with (
        serve(app_of(trio[0], own)) as client,
        client.get("/ask/x", headers={"traceparent": PARENT}),
    ):
        pass
    call, _ = spans.pair("here_async")
    assert call.parent_id == spans.single("own").span_id
    assert spans.named("GET /ask/{name}") == []


async def test_unreadable_headers_are_ignored(trio: Trio, spans: Spans) -> None:
    headers = [("traceparent", PARENT), ("traceparent", PARENT)]
    async with (
        serve(app_of(trio[0])) as client,
        client.get("/ask/x", headers=headers) as response,
    ):
        assert response.status == 200
    assert spans.single("GET /ask/{name}").parent_id is None


async def test_untraced_application_has_no_spans(plain: Trio, spans: Spans) -> None:
    async with serve(app_of(plain[0])) as client, client.get("/ask/x") as response:
        assert response.status == 200
    assert spans.all == []


# --- ASGI ----------------------------------------------------------------------------


def asgi_app_of(worker: Worker) -> Starlette:
    async def handle(request: Request) -> JSONResponse:
        await asyncrpc.rpc_async("b", remote.here_async)
        return JSONResponse(request.path_params["name"])

    async def refused(_: Request) -> JSONResponse:
        raise RejectedError("busy", outcome=Outcome.NOT_EXECUTED)

    async def fail(_: Request) -> JSONResponse:
        raise ValueError("no luck")

    app = Starlette(lifespan=asgi.lifespan(worker))
    app.add_middleware(asgi.WorkerMiddleware)
    app.add_route("/ask/{name}", handle)
    app.add_route("/refuse", refused)
    app.add_route("/fail", fail)
    return app


async def test_unmatched_path_has_no_route_in_span(trio: Trio, spans: Spans) -> None:
    assert await asked("asgi", trio[0], "/nowhere") == 404
    assert spans.single("GET").attributes["http.response.status_code"] == 404


# --- websockets, by both -------------------------------------------------------------


async def refused_socket(websocket: WebSocket) -> None:
    await websocket.close()


def socket_app_of(
    door: str, worker: Worker
) -> AbstractAsyncContextManager[aiohttp.ClientSession]:
    """Serve three websockets by a door; return a client of it."""
    if door == "aiohttp":
        app = app_of(worker)

        async def answer(request: web.Request) -> web.WebSocketResponse:
            return await serving.websocket_response(request, SOURCES[request.path])

        for path in SOURCES:
            app.router.add_get(path, answer)
        return serve(app)

    async def answer_asgi(websocket: WebSocket) -> None:
        await asgi.websocket_response(websocket, SOURCES[websocket.scope["path"]])

    starlette = asgi_app_of(worker)
    starlette.routes.extend(WebSocketRoute(path, answer_asgi) for path in SOURCES)
    starlette.routes.append(WebSocketRoute("/refused", refused_socket))
    return uvicorn_client(starlette, http="h11")


async def give_positions(_: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for position in (
        asyncrpc.current_worker().peer("b").stream(remote.positions, 3)
    ):
        yield position


async def give_and_fail(_: AsyncIterator[Any]) -> AsyncIterator[Any]:
    yield 1
    raise ValueError("no luck")


SOURCES: dict[str, Any] = {"/positions": give_positions, "/failing": give_and_fail}


@DOORS
async def test_a_websocket_is_the_parent_of_what_it_streams(
    trio: Trio, spans: Spans, door: str
) -> None:
    async with (
        socket_app_of(door, trio[0]) as client,
        client.ws_connect("/positions", headers={"traceparent": PARENT}) as websocket,
    ):
        positions = [await websocket.receive_json() for _ in range(3)]
        assert (await websocket.receive()).type is aiohttp.WSMsgType.CLOSE
    request = spans.single("GET /positions")
    assert (request.trace_id, request.parent_id) == (TRACE_ID, SPAN_ID)
    assert (request.kind, request.status) == ("SERVER", "UNSET")
    assert request.attributes["http.response.status_code"] == 101
    assert request.attributes["asyncrpc.websocket.close_code"] == 1000
    stream, produced = spans.pair("positions")
    assert stream.parent_id == request.span_id
    assert positions == [[TRACE_ID, produced.span_id]] * 3


@DOORS
async def test_failed_websocket_has_error(trio: Trio, spans: Spans, door: str) -> None:
    async with (
        socket_app_of(door, trio[0]) as client,
        client.ws_connect("/failing") as websocket,
    ):
        assert await websocket.receive_json() == 1
        assert (await websocket.receive()).data == 1011
    request = spans.single("GET /failing")
    assert (request.error_type, request.status) == ("1011", "ERROR")
    assert request.attributes["http.response.status_code"] == 101


async def test_refused_websocket_has_a_403_span(trio: Trio, spans: Spans) -> None:
    async with socket_app_of("asgi", trio[0]) as client:
        with pytest.raises(aiohttp.WSServerHandshakeError, match="403"):
            await client.ws_connect("/refused")
    request = spans.single("GET /refused")
    assert request.attributes["http.response.status_code"] == 403
    assert request.status == "UNSET"


# --- over processes ------------------------------------------------------------------


async def through_all(request: web.Request) -> web.Response:
    """Go on over three workers, then read a stream of the last one to its end."""
    worker = asyncrpc.current_worker()
    result = await worker.peer("b").call(remote.through, "b", "c", "d")
    items = [item async for item in worker.peer("d").stream(remote.positions, 20)]
    return web.json_response({"calls": result, "stream": items})


async def spans_of(a: Worker, *names: str) -> AsyncIterator[tuple[str, list[Shown]]]:
    for name in names:
        yield name, await a.peer(name).call(remote.ended)


async def test_trace_covers_a_request_over_three_processes(spans: Spans) -> None:
    names = ["b", "c", "d"]
    async with ProcessCluster(names, method="forkserver") as a:
        await a.group(names).call(remote.begin)
        spans.trace(a)
        app = app_of(a)
        app.router.add_get("/through", through_all)
        headers = {"traceparent": PARENT}
        async with (
            serve(app) as client,
            client.get("/through", headers=headers) as response,
        ):
            answer = await response.json()
        here = spans.all
        there = {name: remote_spans async for name, remote_spans in spans_of(a, *names)}

    request = spans.single("GET /through")
    assert request.parent_id == SPAN_ID
    all_of_them = [
        *here,
        *(
            remote_span
            for remote_spans in there.values()
            for remote_span in remote_spans
        ),
    ]
    assert {span.trace_id for span in all_of_them} == {TRACE_ID}
    assert len(all_of_them) == len({span.span_id for span in all_of_them}) == 9

    call, stream = (spans.single(name, "CLIENT") for name in ("through", "positions"))
    assert call.parent_id == stream.parent_id == request.span_id
    at_b = {span.kind: span for span in there["b"]}
    at_c = {span.kind: span for span in there["c"]}
    at_d = {span.name: span for span in there["d"]}
    chain = [
        call,
        at_b["SERVER"],
        at_b["CLIENT"],
        at_c["SERVER"],
        at_c["CLIENT"],
        at_d["through"],
    ]
    parents = [span.span_id for span in chain[:-1]]
    assert [span.parent_id for span in chain[1:]] == parents
    assert answer["calls"] == [[span.trace_id, span.span_id] for span in chain[1::2]]
    produced = at_d["positions"]
    assert produced.parent_id == stream.span_id
    assert answer["stream"] == [[TRACE_ID, produced.span_id]] * 20
    assert produced.attributes["asyncrpc.stream.items"] == 20
    assert trace.get_current_span().get_span_context().is_valid is False
