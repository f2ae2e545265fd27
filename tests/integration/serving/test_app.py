"""A worker in an aiohttp application: lifetime, current worker, deadlines, errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Final

import aiohttp
import pytest
from aiohttp import web

import asyncrpc
from asyncrpc import UsageError, Worker, current_worker, serving
from tests.integration.serving import remote
from tests.integration.serving.conftest import Group, Serving

OTHER: Final = web.AppKey("other_worker", Worker)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def app_with(
    group: Group, handler: Handler, *, timeout_s: float | None = None
) -> web.Application:
    app = web.Application(middlewares=[serving.middleware(timeout_s=timeout_s)])
    app.cleanup_ctx.append(serving.worker_context(group.front))
    app.router.add_get("/", handler)
    return app


async def test_a_handler_calls_other_workers(
    group: Group, serving_app: Serving
) -> None:
    async def handler(request: web.Request) -> web.Response:
        worker = request.app[serving.WORKER]
        assert current_worker() is worker
        doubled = await asyncrpc.rpc_async("back", remote.double, args=([1, 2],))
        return web.json_response({"name": worker.name, "doubled": doubled})

    async with (
        serving_app(app_with(group, handler)) as client,
        client.get("/") as response,
    ):
        assert await response.json() == {"name": "front", "doubled": [2, 4]}


async def test_the_worker_ends_with_the_application(
    group: Group, serving_app: Serving
) -> None:
    app = web.Application()
    app.cleanup_ctx.append(serving.worker_context(group.front))
    async with serving_app(app):
        worker = app[serving.WORKER]
        assert not worker.is_closed
    assert worker.is_closed


async def test_a_running_worker_is_left_running(
    group: Group, serving_app: Serving
) -> None:
    app = web.Application()
    app.cleanup_ctx.append(serving.worker_context(group.back))
    async with serving_app(app):
        assert app[serving.WORKER] is group.back
    assert not group.back.is_closed


async def test_two_workers_in_one_application(
    group: Group, serving_app: Serving
) -> None:
    """Each has its key; the middleware of a sub-application chooses its own."""

    async def handler(request: web.Request) -> web.Response:
        name = current_worker().name
        other = request.config_dict[OTHER]
        doubled = await other.peer("back").call(remote.double, [4])
        return web.json_response([name, *doubled])

    app = app_with(group, handler)
    second = serving.worker_context(lambda: group.front("second", 2), key=OTHER)
    app.cleanup_ctx.append(second)
    inner = web.Application(middlewares=[serving.middleware(key=OTHER)])
    inner.router.add_get("/", handler)
    app.add_subapp("/inner", inner)
    async with serving_app(app) as client:
        async with client.get("/") as response:
            assert await response.json() == ["front", 8]
        async with client.get("/inner/") as response:
            assert await response.json() == ["second", 8]


async def test_two_workers_under_one_key_are_refused(
    group: Group, serving_app: Serving
) -> None:
    app = web.Application()
    app.cleanup_ctx.append(serving.worker_context(group.front))
    app.cleanup_ctx.append(serving.worker_context(lambda: group.front("second", 2)))
    with pytest.raises(UsageError, match=r"its own web\.AppKey"):
        async with serving_app(app):
            pass
    assert app[serving.WORKER].is_closed


async def test_a_client_that_leaves_cancels_the_remote_work(
    group: Group, serving_app: Serving
) -> None:
    async def handler(request: web.Request) -> web.Response:
        await asyncrpc.rpc_async("back", remote.wait_forever, args=(group.name,))
        return web.Response()

    async with serving_app(app_with(group, handler)) as client:
        request = asyncio.create_task(client.get("/"))
        async with asyncio.timeout(30):
            await group.watch.begun.wait()
            assert not group.watch.cancelled.is_set()
            request.cancel()  # closes the client's connection
            await group.watch.cancelled.wait()


async def answer_to(
    group: Group, serving_app: Serving, function: Callable[[], Awaitable[None]]
) -> tuple[aiohttp.ClientResponse, dict[str, str]]:
    async def handler(request: web.Request) -> web.Response:
        await asyncrpc.rpc_async("back", function)
        return web.Response()

    async with (
        serving_app(app_with(group, handler)) as client,
        client.get("/") as response,
    ):
        text = await response.text()
    return response, json.loads(text) if text.startswith("{") else {}


async def test_the_deadline_is_504_and_travels(
    group: Group, serving_app: Serving
) -> None:
    async def handler(request: web.Request) -> web.Response:
        await asyncrpc.rpc_async("back", remote.wait_forever, args=(group.name,))
        return web.Response()

    async with (
        serving_app(app_with(group, handler, timeout_s=0.1)) as client,
        client.get("/") as response,
    ):
        assert response.status == 504
        assert (await response.json())["error"] == "DeadlineExceededError"
    async with asyncio.timeout(30):
        await group.watch.cancelled.wait()


async def test_a_deadline_outside_any_call_is_504(
    group: Group, serving_app: Serving
) -> None:
    async def handler(request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        return web.Response()

    async with (
        serving_app(app_with(group, handler, timeout_s=0.05)) as client,
        client.get("/") as response,
    ):
        assert response.status == 504
        assert (await response.json())["error"] == "DeadlineExceededError"


async def test_a_refused_call_is_503_with_retry_after(
    group: Group, serving_app: Serving
) -> None:
    response, body = await answer_to(group, serving_app, remote.refuse)
    assert (response.status, body["error"]) == (503, "RejectedError")
    assert response.headers["Retry-After"] == "1"


async def test_a_lost_worker_is_503(group: Group, serving_app: Serving) -> None:
    async def handler(request: web.Request) -> web.Response:
        await group.back.shutdown(drain_timeout_s=0.0)
        await asyncrpc.rpc_async("back", remote.fail)
        return web.Response()

    async with (
        serving_app(app_with(group, handler)) as client,
        client.get("/") as response,
    ):
        assert response.status == 503
        assert (await response.json())["error"] == "WorkerLostError"
        assert "Retry-After" in response.headers


async def test_an_application_whose_worker_has_ended_is_503(
    group: Group, serving_app: Serving
) -> None:
    async def handler(request: web.Request) -> web.Response:
        await request.app[serving.WORKER].shutdown()
        request.app[serving.WORKER].peer("back")
        return web.Response()

    async with (
        serving_app(app_with(group, handler)) as client,
        client.get("/") as response,
    ):
        assert response.status == 503
        assert (await response.json())["error"] == "NotStartedError"


async def test_an_error_of_the_function_is_500(
    group: Group, serving_app: Serving
) -> None:
    response, body = await answer_to(group, serving_app, remote.fail)
    assert (response.status, body) == (500, {})


async def test_a_timeout_that_the_function_raised_is_not_the_deadline(
    group: Group, serving_app: Serving
) -> None:
    """aiohttp itself makes a 504 of any TimeoutError, without a word of ours."""
    response, body = await answer_to(group, serving_app, remote.time_out)
    assert (response.status, body) == (504, {})


async def test_a_response_that_has_begun_is_cut_off_not_answered_twice(
    group: Group, serving_app: Serving
) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"half")
        await asyncrpc.rpc_async("back", remote.refuse)
        return response

    async with (
        serving_app(app_with(group, handler)) as client,
        client.get("/") as response,
    ):
        assert response.status == 200
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()


@pytest.mark.parametrize("number", [-1.0, float("nan"), float("inf")])
def test_impossible_numbers_are_refused(number: float) -> None:
    with pytest.raises(UsageError, match="timeout_s"):
        serving.middleware(timeout_s=number)
    with pytest.raises(UsageError, match="retry_after_s"):
        serving.middleware(retry_after_s=number)
