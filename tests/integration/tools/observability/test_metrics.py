"""What the metrics of real workers tell, over HTTP."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest
import torch
from aiohttp import web

import asyncrpc
from asyncrpc import LimitOptions, Options, UsageError, Worker, observability, serving
from asyncrpc.testing import Cluster, ProcessCluster, acting_as
from tests.integration.tools.observability import remote
from tests.integration.tools.observability.conftest import Scraped, scrape

ROUND_MAX = 1000


@pytest.fixture
async def pair() -> AsyncIterator[tuple[Worker, Worker]]:
    async with Cluster(names=["a", "b"], network="uds") as (a, b):
        yield a, b


async def until(read: Callable[[], Any], holds: Callable[[Scraped], bool]) -> Scraped:
    """Scrape until something is told."""
    for _ in range(ROUND_MAX):
        scraped: Scraped = await read()
        if holds(scraped):
            return scraped
    raise AssertionError("it was never told")


async def test_calls_are_counted_at_both_ends(pair: tuple[Worker, Worker]) -> None:
    a, b = pair
    async with (
        observability.serve_metrics(a, port=0, peers_max=5) as at_a,
        observability.serve_metrics(b, port=0, path="/m") as at_b,
    ):
        peer = a.peer("b")
        assert await peer.call(remote.double, 2) == 4
        with pytest.raises(KeyError):
            await peer.call(remote.fail)
        assert [item async for item in peer.stream(remote.count_to, 5)] == [*range(5)]
        await peer.call(torch.sum, torch.ones(1000))
        here = await scrape(f"http://127.0.0.1:{at_a}/metrics")
        there = await scrape(f"http://127.0.0.1:{at_b}/m")
    calls = "rpc_client_call_duration_seconds_count"
    (double,) = (call for call in here.labels(calls, "rpc_method") if "double" in call)
    assert here.value(calls, rpc_method=double, error_type="") == 1
    assert here.labels(calls, "error_type") == {"", "KeyError"}
    assert here.value("rpc_client_request_size_bytes_sum") == 4000
    assert here.value("asyncrpc_client_stream_items_sum") == 5
    assert here.value("asyncrpc_client_peer_call_duration_seconds_count", peer="b") >= 3
    served = "rpc_server_call_duration_seconds_count"
    assert there.value(served, rpc_method=double, error_type="") == 1
    assert there.value(served, error_type="KeyError") == 1
    assert there.value("asyncrpc_server_queue_duration_seconds_count") >= 3
    assert there.value("asyncrpc_server_stream_items_sum") == 5
    assert there.value("asyncrpc_worker_info", worker="b") == 1


async def test_gauges_are_read_at_scrape_time(pair: tuple[Worker, Worker]) -> None:
    a, b = pair
    held = remote.waiting["held"] = asyncio.Event()
    async with observability.serve_metrics(b, port=0) as port:
        url = f"http://127.0.0.1:{port}/metrics"
        await a.peer("b").call(remote.double, 1)
        call = asyncio.ensure_future(a.peer("b").call(remote.wait_for, "held"))
        value = a.peer("b").remote(remote.double, 3)
        assert await value.to_here() == 6
        scraped = await until(
            lambda: scrape(url),
            lambda page: page.value("asyncrpc_server_calls_in_flight") == 1,
        )
        assert scraped.value("asyncrpc_references") == 1
        assert scraped.value("asyncrpc_reference_changes_total", change="made") == 1
        assert scraped.value("asyncrpc_links", state="open") >= 1
        assert scraped.value("asyncrpc_links", state="broken") == 0
        assert scraped.value("asyncrpc_members") == 2
        held.set()
        await call
        value.release()
        await until(
            lambda: scrape(url),
            lambda page: (
                page.value("asyncrpc_references") == 0
                and page.value("asyncrpc_server_calls_in_flight") == 0
            ),
        )


async def test_refused_calls_are_counted() -> None:
    options = Options(limits=LimitOptions(inbound_calls_max=1))
    held = remote.waiting["held"] = asyncio.Event()
    async with (
        Cluster(names=["a", "b"], options=options) as (a, b),
        observability.serve_metrics(b, port=0) as port,
    ):
        call = asyncio.ensure_future(a.peer("b").call(remote.wait_for, "held"))
        await asyncio.sleep(0)
        with pytest.raises(asyncrpc.RejectedError):
            await a.peer("b").call(remote.double, 1)
        held.set()
        await call
        scraped = await scrape(f"http://127.0.0.1:{port}/metrics")
    assert scraped.value("asyncrpc_server_calls_refused_total") == 1


HOSTS = {
    "localhost": 200,
    "LOCALHOST:80": 200,
    "127.0.0.1": 200,
    "127.9.9.9:1": 200,
    "[::1]:80": 200,
    "evil.example": 403,
    "localhost.evil.example": 403,
    "127.0.0.1.evil.example": 403,
    "127.0.0.1@evil.example": 403,
    "10.0.0.1": 403,
    "": 403,
}


@pytest.mark.parametrize(("host", "status"), HOSTS.items())
async def test_port_at_loopback_accepts_local_host_names_only(
    pair: tuple[Worker, Worker], host: str, status: int
) -> None:
    """A page of another site whose name leads here cannot read it."""
    async with (
        observability.serve_metrics(pair[0], port=0) as port,
        aiohttp.ClientSession(headers={"Host": host}) as client,
        client.get(f"http://127.0.0.1:{port}/metrics") as response,
    ):
        assert response.status == status


async def test_port_at_all_interfaces_accepts_any_host_name(
    pair: tuple[Worker, Worker],
) -> None:
    async with (
        observability.serve_metrics(pair[0], port=0, host="") as port,
        aiohttp.ClientSession(headers={"Host": "pod.example"}) as client,
        client.get(f"http://127.0.0.1:{port}/metrics") as response,
    ):
        assert response.status == 200


async def test_lag_of_the_loop_is_measured(pair: tuple[Worker, Worker]) -> None:
    async with observability.serve_metrics(pair[0], port=0) as port:
        url = f"http://127.0.0.1:{port}/metrics"
        scraped = await until(
            lambda: scrape(url),
            lambda page: page.value("asyncrpc_loop_lag_seconds_count") >= 2,
        )
    assert scraped.value("asyncrpc_gil_lag_seconds_count") >= 2


async def test_metrics_thread_reports_a_blocked_loop(
    pair: tuple[Worker, Worker],
) -> None:
    """The metrics are served by another loop, so they are there meanwhile."""
    reported = threading.Event()

    async def watch() -> Scraped:
        async with observability.serve_metrics(pair[0], port=0) as port:
            url = f"http://127.0.0.1:{port}/metrics"
            started.set()
            scraped = await until(
                lambda: scrape(url),
                lambda page: page.value("asyncrpc_loop_blocked_seconds") > 0.1,
            )
            reported.set()
            return scraped

    started = threading.Event()
    watching = asyncio.create_task(asyncio.to_thread(lambda: asyncio.run(watch())))
    await asyncio.to_thread(started.wait)
    assert reported.wait(120)  # this blocks the loop
    await watching


async def test_worker_without_metrics_records_nothing(
    pair: tuple[Worker, Worker],
) -> None:
    a, _ = pair
    await a.peer("b").call(remote.double, 1)
    ring = a.parts.recorder.calls
    plain = ring.record
    threads = threading.active_count()
    with observability.Metrics(a):
        assert ring.record != plain
        assert threading.active_count() == threads + 1
    assert ring.record == plain


# --- an application of the user ------------------------------------------------------


async def served(app: web.Application) -> Scraped:
    runner = web.AppRunner(app)
    try:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        return await scrape(f"http://127.0.0.1:{port}/metrics")
    finally:
        await runner.cleanup()


async def test_application_shows_its_own_worker() -> None:
    app = web.Application()
    meeting = asyncrpc.LocalRendezvous(1)
    worker = Worker("front", rank=0, rendezvous=meeting)
    app.cleanup_ctx.append(serving.worker_context(worker))
    observability.add_metrics(app)
    scraped = await served(app)
    assert scraped.value("asyncrpc_worker_info", worker="front") == 1
    assert scraped.value("asyncrpc_worker_running") == 1


async def test_application_shows_a_running_worker(pair: tuple[Worker, Worker]) -> None:
    app = web.Application()
    observability.add_metrics(app, pair[0], with_process=True)
    scraped = await served(app)
    assert scraped.value("asyncrpc_worker_info", worker="a") == 1
    assert scraped.value("process_resident_memory_bytes") > 0


async def test_an_application_without_a_worker_does_not_start() -> None:
    app = web.Application()
    observability.add_metrics(app)
    with pytest.raises(UsageError, match=r"before add_metrics"):
        await served(app)


async def test_running_application_refuses_metrics(pair: tuple[Worker, Worker]) -> None:
    app = web.Application()
    runner = web.AppRunner(app)
    await runner.setup()
    with pytest.raises(UsageError, match="takes no route '/metrics' for metrics"):
        observability.add_metrics(app, pair[0])
    await runner.cleanup()


async def asgi_messages(app: Any, method: str = "GET", kind: str = "http") -> list[Any]:
    """Return what an ASGI application sends for a request."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    headers = [(b"accept", b"application/openmetrics-text;version=1.0.0")]
    await app({"type": kind, "method": method, "headers": headers}, receive, send)
    return sent


async def test_an_asgi_application_answers(pair: tuple[Worker, Worker]) -> None:
    with observability.Metrics(pair[0]) as metrics:
        app = observability.metrics_asgi(metrics)
        start, body = await asgi_messages(app)
        assert start["status"] == 200
        assert Scraped(body["body"].decode()).value("asyncrpc_worker_running") == 1
        headers = dict(start["headers"])
        assert headers[b"content-length"] == str(len(body["body"])).encode()
        start, body = await asgi_messages(app, "HEAD")
        assert (start["status"], body["body"]) == (200, b"")
        start, _ = await asgi_messages(app, "POST")
        assert (start["status"], dict(start["headers"])[b"allow"]) == (
            405,
            b"GET, HEAD",
        )
        (closed,) = await asgi_messages(app, kind="websocket")
        assert closed == {"type": "websocket.close"}


async def test_an_asgi_application_starts_and_ends_with_its_server(
    pair: tuple[Worker, Worker],
) -> None:
    comes = iter(["lifespan.startup", "lifespan.shutdown"])
    sent: list[str] = []

    async def receive() -> Any:
        return {"type": next(comes)}

    async def send(message: Any) -> None:
        sent.append(message["type"])

    app = observability.metrics_asgi(observability.Metrics(pair[0]))
    await app({"type": "lifespan"}, receive, send)
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


# --- a port of its own ---------------------------------------------------------------


async def test_port_in_use_is_reported(pair: tuple[Worker, Worker]) -> None:
    async with observability.serve_metrics(pair[0], port=0) as port:
        words = f"serve_metrics cannot listen at port {port} of host"
        with pytest.raises(UsageError, match=words):
            await observability.serve_metrics(pair[0], port=port).__aenter__()
        async with (
            aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client,
            client.get("/other") as other,
            client.post("/metrics") as posted,
        ):
            assert (other.status, posted.status) == (404, 405)


async def test_requests_at_once_are_answered_in_turn(
    pair: tuple[Worker, Worker],
) -> None:
    async with observability.serve_metrics(pair[0], port=0) as port:
        url = f"http://127.0.0.1:{port}/metrics"
        pages = await asyncio.gather(*(scrape(url) for _ in range(20)))
    assert all(page.value("asyncrpc_worker_running") == 1 for page in pages)


async def test_three_processes_have_a_route_each() -> None:
    cluster = ProcessCluster(["b", "c"], method="forkserver")
    async with cluster as a, observability.serve_metrics(a, port=0) as own:
        with acting_as(a):
            there = {name: await a.peer(name).call(remote.serve_here) for name in "bc"}
            for number in range(10):
                await a.peer("b").call(remote.double, number)
            scrapes = {
                name: await scrape(f"http://127.0.0.1:{port}/metrics")
                for name, port in {"a": own, **there}.items()
            }
            for name in "bc":
                await a.peer(name).call(remote.serve_no_more)
    calls = {
        name: sum(
            sample.value
            for sample in scraped.samples
            if sample.name == "rpc_server_call_duration_seconds_count"
            and "double" in sample.labels["rpc_method"]
        )
        for name, scraped in scrapes.items()
    }
    assert calls == {"a": 0, "b": 10, "c": 0}
    for name, scraped in scrapes.items():
        assert scraped.value("asyncrpc_worker_info", worker=name) == 1
        assert scraped.value("asyncrpc_members") == 3
