"""The two health checks, as a load balancer sees them."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from aiohttp import web

from asyncrpc import Worker, serving
from tests.integration.serving import remote
from tests.integration.serving.conftest import Group, Serving

OTHER: Final = web.AppKey("other_worker", Worker)


def app_with_health(group: Group, *keys: web.AppKey[Any]) -> web.Application:
    app = web.Application()
    app.cleanup_ctx.append(serving.worker_context(group.front))
    app.add_routes(serving.health_routes(*keys))
    return app


async def test_ready_tells_peers_and_calls(group: Group, serving_app: Serving) -> None:
    app = app_with_health(group)
    async with serving_app(app) as client:
        back = app[serving.WORKER].peer("back")
        call = asyncio.create_task(back.call(remote.wait_forever, group.name))
        await group.watch.begun.wait()
        async with client.get("/readyz") as response:
            assert response.status == 200
            body = await response.json()
        assert serving.status_of(group.back).calls_served == 1
        call.cancel()
    assert body["ready"] is True
    (state,) = body["workers"]
    assert (state["name"], state["rank"]) == ("front", group.front().rank)
    assert (state["peers"], state["calls_in_flight"]) == (["back"], 1)
    assert (state["calls_served"], state["draining"]) == (0, False)


async def test_a_worker_that_ends_is_not_ready_but_the_process_lives(
    group: Group, serving_app: Serving
) -> None:
    app = app_with_health(group)
    async with serving_app(app) as client:
        await app[serving.WORKER].shutdown()
        async with client.get("/readyz") as response:
            assert response.status == 503
            assert (await response.json())["ready"] is False
        async with client.get("/healthz") as response:
            assert response.status == 200
        async with client.head("/readyz") as response:
            assert response.status == 503


async def test_a_draining_worker_is_not_ready(
    group: Group, serving_app: Serving
) -> None:
    app = app_with_health(group)
    async with serving_app(app) as client:
        worker = app[serving.WORKER]
        await worker.peer("back").call(remote.double, [1])  # now each knows the other
        call = asyncio.create_task(
            group.back.peer("front").call(remote.wait_forever, group.name)
        )
        await group.watch.begun.wait()
        ending = asyncio.create_task(worker.shutdown(drain_timeout_s=5.0))
        await asyncio.sleep(0)  # it begins at once
        async with client.get("/readyz") as response:
            assert response.status == 503
            (state,) = (await response.json())["workers"]
            assert (state["draining"], state["ready"]) == (True, False)
        call.cancel()
        await ending


async def test_every_watched_worker_has_to_be_there(
    group: Group, serving_app: Serving
) -> None:
    app = app_with_health(group, serving.WORKER, OTHER)
    async with (
        serving_app(app) as client,
        client.get("/readyz") as response,
    ):
        assert response.status == 503
        names = [one["name"] for one in (await response.json())["workers"]]
        assert names == ["front"]


def test_a_worker_that_has_not_been_started_has_a_status() -> None:
    status = serving.status_of(Worker("new", rendezvous={"new": "uds:///nowhere"}))
    assert (status.name, status.ready, status.peers) == ("new", False, ())
