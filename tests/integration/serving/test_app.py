"""What only aiohttp has: several workers by keys, its own answer to timeouts.

What all doors do is in tests/integration/serving/doors.
"""

from __future__ import annotations

import asyncio
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


async def test_application_may_have_two_workers(
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


async def test_duplicate_worker_key_is_refused(
    group: Group, serving_app: Serving
) -> None:
    app = web.Application()
    app.cleanup_ctx.append(serving.worker_context(group.front))
    app.cleanup_ctx.append(serving.worker_context(lambda: group.front("second", 2)))
    with pytest.raises(UsageError, match=r"its own web\.AppKey"):
        async with serving_app(app):
            pass
    assert app[serving.WORKER].is_closed


async def test_a_timeout_that_the_function_raised_is_not_the_deadline(
    group: Group, serving_app: Serving
) -> None:
    """aiohttp itself makes a 504 of any TimeoutError, without a word of ours."""

    async def handler(request: web.Request) -> web.Response:
        await asyncrpc.rpc_async("back", remote.time_out)
        return web.Response()

    async with (
        serving_app(app_with(group, handler)) as client,
        client.get("/") as response,
    ):
        assert response.status == 504
        assert response.content_type == "text/plain"


async def test_stream_of_an_uncancelled_handler_notices_a_lost_client(
    group: Group,
) -> None:
    """A client that has left is noticed by the next comment at the latest."""

    async def handler(request: web.Request) -> web.StreamResponse:
        stream = (
            current_worker()
            .peer("back")
            .stream(remote.give_and_wait, group.name, "one")
        )
        return await serving.sse_response(request, stream, keep_alive_s=0.01)

    runner = web.AppRunner(app_with(group, handler), shutdown_timeout=1.0)
    try:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
        async with aiohttp.ClientSession() as client, asyncio.timeout(30):
            response = await client.get(url)
            await group.watch.begun.wait()
            response.close()
            await group.watch.cancelled.wait()
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("number", [-1.0, float("nan"), float("inf")])
def test_impossible_numbers_are_refused(number: float) -> None:
    with pytest.raises(UsageError, match="timeout_s"):
        serving.middleware(timeout_s=number)
    with pytest.raises(UsageError, match="retry_after_s"):
        serving.middleware(retry_after_s=number)
