"""The two health checks, as a load balancer sees them."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
from aiohttp import web

from asyncrpc import Worker, serving
from asyncrpc.core.logs import LINES_AT_ONCE
from asyncrpc.errors import UsageError
from asyncrpc.serving import listening
from tests.integration.serving import remote
from tests.integration.serving.conftest import Group, Serving

OTHER: Final = web.AppKey("other_worker", Worker)


def app_with_health(group: Group, *keys: web.AppKey[Any]) -> web.Application:
    app = web.Application()
    app.cleanup_ctx.append(serving.worker_context(group.front))
    app.add_routes(serving.health_routes(*keys))
    return app


async def test_readiness_shows_peers_and_calls(
    group: Group, serving_app: Serving
) -> None:
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


async def test_ending_worker_is_live_but_not_ready(
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


async def test_readiness_needs_all_watched_workers(
    group: Group, serving_app: Serving
) -> None:
    app = app_with_health(group, serving.WORKER, OTHER)
    async with serving_app(app) as client, client.get("/readyz") as response:
        assert response.status == 503
        names = [worker["name"] for worker in (await response.json())["workers"]]
        assert names == ["front"]


def test_a_worker_that_has_not_been_started_has_a_status() -> None:
    status = serving.status_of(Worker("new", rendezvous={"new": "uds:///nowhere"}))
    assert (status.name, status.ready, status.peers) == ("new", False, ())


async def test_a_program_without_an_application_is_probed(group: Group) -> None:
    front = group.front()
    async with (
        serving.serve_health(front, port=0, host="127.0.0.1") as port,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client,
    ):
        async with client.get("/readyz") as response:
            assert response.status == 503  # it has not met the others
        async with client.get("/healthz") as response:
            assert response.status == 200
        async with front, client.get("/readyz") as response:
            assert response.status == 200
            (state,) = (await response.json())["workers"]
            assert state["name"] == "front"
        async with client.get("/readyz") as response:
            assert response.status == 503


async def test_worker_waiting_for_the_others_is_not_ready(tmp_path: Path) -> None:
    where = f"file://{tmp_path}/meeting"
    worker = Worker("a", rank=0, world_size=2, rendezvous=where)
    starting = asyncio.create_task(worker.__aenter__())
    async with (
        serving.serve_health(worker, port=0, host="127.0.0.1") as port,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client,
        client.get("/readyz") as response,
    ):
        (state,) = (await response.json())["workers"]
        assert (response.status, state["ready"]) == (503, False)
        assert not worker.is_closed  # it has begun to start
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting


async def test_health_may_be_served_by_another_thread(group: Group) -> None:
    async def ask() -> int:
        async with (
            serving.serve_health(group.back, port=0, host="127.0.0.1") as port,
            aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client,
            client.get("/readyz") as response,
        ):
            return response.status

    assert await asyncio.to_thread(lambda: asyncio.run(ask())) == 200


async def test_silent_connections_keep_no_probe_out(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "CONNECTIONS_MAX", 8)
    async with (
        serving.serve_health(group.back, port=0, host="127.0.0.1") as port,
        contextlib.AsyncExitStack() as stack,
    ):
        readers = []
        for _ in range(20):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            stack.callback(writer.close)
            readers.append(reader)
        async with (
            asyncio.timeout(60),
            aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client,
            client.get("/readyz") as response,
        ):
            assert response.status == 200
            for reader in readers[:12]:
                with contextlib.suppress(ConnectionError):
                    assert await reader.read() == b""


async def test_non_http_requests_do_not_fill_the_log(
    group: Group, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving.serve_health(group.back, port=0, host="127.0.0.1") as port:
        for _ in range(2 * LINES_AT_ONCE):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n")
            assert b" 400 " in await reader.read()
            writer.close()
    lines = [record for record in caplog.records if record.exc_info]
    assert LINES_AT_ONCE <= len(lines) < 2 * LINES_AT_ONCE
    assert {line.name for line in lines} == {"asyncrpc"}


async def test_port_in_use_is_reported(group: Group) -> None:
    back = group.back
    async with serving.serve_health(back, port=0, host="127.0.0.1") as port:
        with pytest.raises(UsageError, match=f"cannot listen at port {port} of host "):
            await serving.serve_health(back, port=port, host="127.0.0.1").__aenter__()


@pytest.mark.parametrize(
    ("workers", "port", "words"),
    [
        ([], 0, "at least one worker"),
        (["a"], 0, r"workers\[0\] must be a Worker"),
        (["a"], 65_536, "port must be an integer of at least 0 and at most 65535"),
    ],
)
async def test_serve_health_names_wrong_arguments(
    workers: list[Any], port: int, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        await serving.serve_health(*workers, port=port).__aenter__()
