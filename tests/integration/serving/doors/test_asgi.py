"""What only an ASGI application has: lifespans, background tasks, plain functions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import aiohttp
import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Mount

import asyncrpc
from asyncrpc import UsageError, current_worker
from asyncrpc.serving import asgi
from asyncrpc.serving.asgi.machine.connection import AsgiApplication, send_response
from tests.integration.serving import remote
from tests.integration.serving.conftest import Group
from tests.integration.serving.doors.clients import events_of
from tests.integration.serving.doors.servers import uvicorn_client

Handler = Callable[[Request], Awaitable[Response]]


served = partial(uvicorn_client, http="httptools")


def starlette_app(group: Group, handler: Handler, **options: Any) -> Starlette:
    app = Starlette(lifespan=asgi.lifespan(group.front))
    app.add_middleware(asgi.WorkerMiddleware, **options)
    app.add_route("/", handler, methods=["GET", "POST"])
    return app


async def wait_there(group: Group) -> None:
    await asyncrpc.rpc_async("back", remote.wait_forever, args=(group.name,))


# --- what goes on --------------------------------------------------------------------


async def test_background_task_outlives_its_client(group: Group) -> None:
    """The response is complete: what is done then is the application's own work."""
    may_end, has_ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        await may_end.wait()
        await asyncrpc.rpc_async("back", remote.double, args=([1],))
        has_ended.set()

    async def handle(_: Request) -> Response:
        return PlainTextResponse("answered", background=BackgroundTask(work))

    async with served(starlette_app(group, handle)) as client:
        async with client.get("/") as response:
            assert await response.text() == "answered"
        await client.close()
        may_end.set()
        async with asyncio.timeout(30):
            await has_ended.wait()


async def test_the_deadline_ends_with_the_complete_response(group: Group) -> None:
    """Neither a background task nor a task that was left is limited by it."""
    is_over, ended = asyncio.Event(), asyncio.Queue[Any]()

    async def work(name: str) -> None:
        try:
            await is_over.wait()
            doubled = await asyncrpc.rpc_async("back", remote.double, args=([1],))
            await ended.put((name, doubled))
        except BaseException as error:
            await ended.put((name, error))
            raise

    left: list[asyncio.Task[None]] = []

    async def handle(_: Request) -> Response:
        left.append(asyncio.create_task(work("left")))
        return PlainTextResponse("answered", background=BackgroundTask(work, "after"))

    app = starlette_app(group, handle, timeout_s=0.2)
    async with served(app) as client:
        async with client.get("/") as response:
            assert await response.text() == "answered"
        asyncio.get_running_loop().call_later(0.4, is_over.set)  # past the deadline
        async with asyncio.timeout(30):
            outcomes = [await ended.get(), await ended.get()]
        assert sorted(outcomes) == [("after", [2]), ("left", [2])]
        await asyncio.gather(*left)


async def test_task_of_a_handler_outlives_a_passed_deadline(group: Group) -> None:
    left: list[asyncio.Task[Any]] = []
    is_answered = asyncio.Event()

    async def work() -> Any:
        await is_answered.wait()
        return await asyncrpc.rpc_async("back", remote.double, args=([1],))

    async def handle(_: Request) -> Response:
        left.append(asyncio.create_task(work()))
        await asyncio.Event().wait()
        return Response()

    async with served(starlette_app(group, handle, timeout_s=0.1)) as client:
        async with client.get("/") as response:
            assert response.status == 504
        is_answered.set()
        async with asyncio.timeout(30):
            assert await left[0] == [2]


@pytest.mark.parametrize("answers", ["waits", "streams"])
@pytest.mark.parametrize("with_ours", [True, False])
async def test_early_client_departure_is_not_an_error_of_outer_middleware(
    group: Group, caplog: pytest.LogCaptureFixture, answers: str, *, with_ours: bool
) -> None:
    is_over = asyncio.Event()

    async def forever(_: str) -> AsyncIterator[Any]:
        group.watch.begun.set()
        await asyncio.Event().wait()
        yield

    async def handle(request: Request) -> Response:
        if answers == "streams":
            response: Response = asgi.sse_response(forever, begin_within_s=600.0)
            return response
        group.watch.begun.set()
        await asyncio.Event().wait()
        return Response()

    async def stamp(request: Request, call_next: Any) -> Any:
        try:
            return await call_next(request)
        finally:
            is_over.set()

    app = Starlette(lifespan=asgi.lifespan(group.front))
    app.add_route("/", handle)
    if with_ours:
        app.add_middleware(asgi.WorkerMiddleware)
    elif answers == "waits":
        return  # nothing of ours is there
    app.add_middleware(BaseHTTPMiddleware, dispatch=stamp)
    async with served(app) as client, asyncio.timeout(30):
        request = asyncio.create_task(client.get("/"))
        await group.watch.begun.wait()
        request.cancel()
        await asyncio.wait([request])
        await is_over.wait()
        await current_connections_are_lost(client)
    assert "No response returned" not in caplog.text
    assert "Traceback" not in caplog.text


async def test_handler_cancellation_can_be_switched_off(group: Group) -> None:
    begun, may_end, has_ended = (asyncio.Event() for _ in range(3))

    async def handle(_: Request) -> Response:
        begun.set()
        await may_end.wait()
        has_ended.set()
        return Response()

    app = starlette_app(group, handle, handler_cancellation=False)
    async with served(app) as client, asyncio.timeout(30):
        request = asyncio.create_task(client.get("/"))
        await begun.wait()
        request.cancel()
        await asyncio.wait([request])
        await current_connections_are_lost(client)
        may_end.set()
        await has_ended.wait()


async def current_connections_are_lost(client: aiohttp.ClientSession) -> None:
    """Make sure that the server has seen what came before: it answers in order."""
    async with client.get("/nowhere") as response:
        assert response.status == 404


async def test_stream_may_have_a_background_task(group: Group) -> None:
    done = asyncio.Event()

    async def note() -> None:
        done.set()

    async def handle(_: Request) -> Response:
        stream = current_worker().peer("back").stream(remote.count_to, 2)
        response: Response = asgi.sse_response(stream, headers={"X-One": "1"})
        response.headers["X-Two"] = "2"
        response.set_cookie("a", "b")
        response.background = BackgroundTask(note)
        return response

    async with (
        served(starlette_app(group, handle)) as client,
        client.get("/") as response,
    ):
        assert (response.headers["X-One"], response.headers["X-Two"]) == ("1", "2")
        assert response.cookies["a"].value == "b"
        assert "Content-Length" not in response.headers
        assert len(await events_of(response)) == 2
        async with asyncio.timeout(30):
            await done.wait()


# --- frameworks ----------------------------------------------------------------------


async def test_plain_function_may_call_from_its_thread(group: Group) -> None:
    app = FastAPI(lifespan=asgi.lifespan(group.front))
    app.add_middleware(asgi.WorkerMiddleware, timeout_s=60.0)

    def get() -> list[int]:
        doubled: list[int] = asyncrpc.rpc_sync("back", remote.double, args=([3],))
        return doubled

    app.add_api_route("/", get)
    async with served(app) as client, client.get("/") as response:
        assert await response.json() == [6]


@pytest.mark.parametrize("is_outside", [True, False])
async def test_framework_middleware_works_around_or_inside(
    group: Group,
    is_outside: bool,  # noqa: FBT001
) -> None:
    """Starlette's `BaseHTTPMiddleware` runs the application in a task of its own."""

    async def stamp(request: Request, call_next: Any) -> Response:
        response: Response = await call_next(request)
        response.headers["X-Stamp"] = "yes"
        return response

    async def handle(_: Request) -> Response:
        peer = current_worker().peer("back")
        response: Response = asgi.sse_response(
            peer.stream(remote.give_and_wait, group.name, "one")
        )
        return response

    app = Starlette(lifespan=asgi.lifespan(group.front))
    app.add_route("/", handle)
    if not is_outside:
        app.add_middleware(BaseHTTPMiddleware, dispatch=stamp)
    app.add_middleware(asgi.WorkerMiddleware)
    if is_outside:
        app.add_middleware(BaseHTTPMiddleware, dispatch=stamp)
    async with served(app) as client:
        response = await client.get("/")
        assert response.headers["X-Stamp"] == "yes"
        async with asyncio.timeout(30):
            await group.watch.begun.wait()
            response.close()
            await group.watch.cancelled.wait()


async def test_stream_without_middleware_notices_a_lost_client(group: Group) -> None:
    """A client that leaves is noticed all the same."""
    app = Starlette(lifespan=asgi.lifespan(group.back))

    async def handle(_: Request) -> Response:
        response: Response = asgi.sse_response(
            group.back.peer("back").stream(remote.give_and_wait, group.name, "one")
        )
        return response

    app.add_route("/", handle)
    async with served(app) as client:
        response = await client.get("/")
        async with asyncio.timeout(30):
            await group.watch.begun.wait()
            response.close()
            await group.watch.cancelled.wait()


async def test_health_checks_may_be_mounted(group: Group) -> None:
    app = Starlette(
        lifespan=asgi.lifespan(group.front),
        routes=[Mount("/health", asgi.health_app(live="/live", ready="/ready"))],
    )
    async with served(app) as client:
        for path, status in (("live", 200), ("ready", 200), ("other", 404)):
            async with client.get(f"/health/{path}") as response:
                assert response.status == status


async def test_expect_continue_is_answered_when_the_body_is_read(group: Group) -> None:
    """`Expect: 100-continue`: the body is not asked for before the handler reads."""

    async def handle(request: Request) -> Response:
        if request.query_params.get("refuse"):
            return JSONResponse("no", status_code=413)
        return JSONResponse(len(await request.body()))

    async with served(starlette_app(group, handle)) as client:
        async with client.post("/", data=b"x" * 10, expect100=True) as response:
            assert await response.json() == 10
        port = client._base_url.port  # type: ignore[union-attr]  # noqa: SLF001
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            b"POST /?refuse=1 HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n"
            b"Expect: 100-continue\r\n\r\n"
        )
        assert (await reader.readline()).startswith(b"HTTP/1.1 413")
        writer.close()
        await writer.wait_closed()


# --- lifespans -----------------------------------------------------------------------


async def test_the_application_has_a_lifespan_inside_the_workers(group: Group) -> None:
    states: list[bool] = []
    front = group.front()

    @asynccontextmanager
    async def own(_: Starlette) -> AsyncIterator[dict[str, str]]:
        states.append(front.is_closed)
        yield {"own": "kept"}
        states.append(front.is_closed)

    async def handle(request: Request) -> Response:
        return JSONResponse([request.state.own, current_worker().name])

    inner = Starlette(lifespan=own)
    inner.add_route("/", handle)
    async with (
        served(asgi.WorkerMiddleware(inner, front)) as client,
        client.get("/") as response,
    ):
        assert await response.json() == ["kept", "front"]
    assert states == [False, False]
    assert front.is_closed


async def lifespan_of(app: AsgiApplication) -> list[dict[str, Any]]:
    """Be the server of a lifespan; return what the application says."""
    sent: list[dict[str, Any]] = []
    coming = [{"type": "lifespan.shutdown"}, {"type": "lifespan.startup"}]

    async def receive() -> Any:
        return coming.pop()

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}
    await app(scope, receive, send)
    return sent


async def nobody(scope: Any, receive: Any, send: Any) -> None:
    """Be an application that knows no lifespan, and does not say so."""


async def test_application_that_returns_from_its_lifespan_completes(
    group: Group,
) -> None:
    sent = await lifespan_of(asgi.WorkerMiddleware(nobody, group.front))
    kinds = [message["type"] for message in sent]
    assert kinds == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


async def test_failed_start_of_the_worker_reaches_the_server(group: Group) -> None:
    async with group.front():
        second = group.front()  # of the same name: it is refused
        sent: list[dict[str, Any]] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            return {"type": "lifespan.startup"}

        app = asgi.WorkerMiddleware(nobody, second)
        with pytest.raises(asyncrpc.AsyncRpcError):
            await app({"type": "lifespan", "state": {}}, receive, send)
    assert [event["type"] for event in sent] == ["lifespan.startup.failed"]
    assert "worker 'front' did not start: " in sent[0]["message"]


@pytest.mark.parametrize("fails_at", ["startup", "shutdown"])
async def test_failed_lifespan_closes_the_worker(group: Group, fails_at: str) -> None:
    worker = group.front()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        if fails_at == "shutdown":
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": f"lifespan.{fails_at}.failed", "message": "no luck"})

    sent = await lifespan_of(asgi.WorkerMiddleware(app, worker))
    last = {"type": f"lifespan.{fails_at}.failed", "message": "no luck"}
    assert sent[-1] == last
    assert worker.is_closed


async def test_application_without_a_worker_is_told_the_remedy() -> None:
    async def receive() -> Any:
        return await asyncio.get_running_loop().create_future()

    async def send(message: Any) -> None:
        raise AssertionError(message)

    app = asgi.WorkerMiddleware(nobody)
    scope = {"type": "http", "headers": [], "path": "/", "method": "GET", "state": {}}
    with pytest.raises(UsageError, match=r"lifespan=asgi\.lifespan\(make_worker\)"):
        await app(scope, receive, send)


async def test_worker_factory_with_another_result_is_refused() -> None:
    maker: Any = dict
    with pytest.raises(UsageError, match=r"what worker\(\) returns must be a Worker"):
        async with asgi.lifespan(maker)(None):
            pass


async def test_workers_are_kept_apart_by_their_keys(group: Group) -> None:
    second = group.front("second", 2)

    @asynccontextmanager
    async def both(app: Starlette) -> AsyncIterator[dict[str, Any]]:
        async with (
            asgi.lifespan(group.front)(app) as first,
            asgi.lifespan(second, key="other")(app) as other,
        ):
            yield {**first, **other}

    async def handle(scope: Any, receive: Any, send: Any) -> None:
        body = current_worker().name.encode()
        await send_response(send, 200, {}, body, prefix="")

    app = Starlette(
        lifespan=both,
        routes=[
            Mount("/first", asgi.WorkerMiddleware(handle)),
            Mount("/other", asgi.WorkerMiddleware(handle, key="other")),
            Mount("/health", asgi.health_app("asyncrpc_worker", "other")),
        ],
    )
    async with served(app) as client:
        for path, name in (("/first/", "front"), ("/other/", "second")):
            async with client.get(path) as response:
                assert await response.text() == name
        async with client.get("/health/readyz") as response:
            shown = (await response.json())["workers"]
            assert [worker["name"] for worker in shown] == ["front", "second"]
