"""The dashboard over HTTP, in an application of a worker: real workers and sockets."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

import aiohttp
import pytest
import pytest_asyncio
import torch
from aiohttp import web
from torch import nn

from asyncrpc import Group, Options, UsageError, Worker, autograd, serving
from asyncrpc.nn import Pipeline, RemoteModule
from asyncrpc.optim import DistributedOptimizer
from asyncrpc.serving.dashboard.application import STREAMS_OF_ONE_MAX
from asyncrpc.testing import Cluster, ProcessCluster, acting_as
from tests.integration.serving.conftest import serve
from tests.integration.serving.looking_in import Browser, Events, Held, token_of, wait
from tests.integration.tools.inspection import hanging

SECRET: Final = "a secret of this test"
TOKEN: Final = "a-token-of-this-test"
BEARER: Final = {"Authorization": f"Bearer {TOKEN}"}
PREFIX: Final = "/any/prefix/"
LISTS: Final = ("overview", "calls", "references", "training", "collectives")
SUMMARY: Final = "inspection.summary"
SECURED: Final = Options(secret=SECRET, drain_timeout_s=0.0)


@pytest_asyncio.fixture
async def workers() -> AsyncIterator[list[Worker]]:
    async with Cluster(3, options=SECURED) as cluster:
        yield list(cluster)


@asynccontextmanager
async def served_dashboard(worker: Worker, **options: Any) -> AsyncIterator[Browser]:
    """Serve the dashboard of a worker below a prefix."""
    app = web.Application()
    app.add_subapp(PREFIX, serving.dashboard(worker, **{"every_s": 0.1, **options}))
    jar = aiohttp.CookieJar(unsafe=True)  # keeps cookies of hosts that are numbers
    async with (
        serve(app) as server,
        aiohttp.ClientSession(server._base_url, cookie_jar=jar) as session,  # noqa: SLF001
    ):
        yield Browser(session, PREFIX)


FOREIGN_HOSTS = (
    *("evil.example", "[::1].evil.example", "[::1]evil", "localhost@evil.example"),
    *("localhost.evil.example", "127.0.0.1.evil.example", "localhost:80:80", "[::2]"),
)
# Python's own modules only, and imported before it becomes the other user.
ASK_AS = """
import encodings.idna, http.client, os, sys, urllib.parse
uid, url = sys.argv[1:]
parts = urllib.parse.urlsplit(url)
asking = http.client.HTTPConnection(parts.hostname, parts.port)
os.setuid(int(uid))
asking.request("GET", parts.path)
print(asking.getresponse().status)
"""

# --- who may look --------------------------------------------------------------------


async def test_secret_signs_in_and_logout_ends_the_session(
    workers: list[Worker],
) -> None:
    async with served_dashboard(workers[0]) as browser:
        assert (await browser.get("api/overview"))[0] == 401
        _, state = await browser.get("login")
        assert (state["signed_in"], state["takes"]) == (False, "secret")
        assert await browser.sign_in(SECRET) == 200
        assert (await browser.get("api/overview"))[0] == 200
        assert (await browser.get("login"))[1]["signed_in"]
        assert (await browser.post("logout", {}))[0] == 200
        assert (await browser.get("api/overview"))[0] == 401


async def test_the_cookie_is_for_the_directory_alone(workers: list[Worker]) -> None:
    async with served_dashboard(workers[0]) as browser:
        credentials = {"token": token_of(SECRET)}
        async with browser.session.post(
            browser.url("login"), json=credentials
        ) as answer:
            cookie = answer.headers["Set-Cookie"].lower()
        assert "httponly" in cookie
        assert "samesite=strict" in cookie
        assert "path=" not in cookie  # that of the request, whatever a proxy has made


async def test_wrong_tokens_are_refused_and_limited(workers: list[Worker]) -> None:
    async with served_dashboard(workers[0]) as browser:
        statuses = [await browser.sign_in("something else") for _ in range(11)]
        assert statuses == [403] * 10 + [429]
        assert await browser.sign_in(SECRET) == 200


@pytest.mark.parametrize("text", ["\ud800", "é", "\0", "x" * 3000, ""])
@pytest.mark.parametrize("field", ["proof", "token", "ticket"])
async def test_arbitrary_text_is_a_wrong_token(
    workers: list[Worker], field: str, text: str
) -> None:
    async with served_dashboard(workers[0], token=TOKEN) as browser:
        assert (await browser.post("login", {field: text}))[0] == 403


async def test_wrong_attempts_do_not_lock_out_a_right_token(
    workers: list[Worker], caplog: pytest.LogCaptureFixture
) -> None:
    """They come from the same address, that of a proxy."""
    async with served_dashboard(workers[0], token=TOKEN) as browser:
        wrong = {"Authorization": "Bearer something-else-of-it"}
        for _ in range(20):
            assert await browser.sign_in("something else") in {403, 429}
            assert (await browser.get("api/calls", **wrong))[0] == 401
        assert (await browser.get("api/calls", **BEARER))[0] == 200
        assert await browser.sign_in(SECRET) == 200
        assert (await browser.get("api/overview"))[0] == 200
    lines = [
        message
        for message in caplog.messages
        if message.startswith("dashboard: a wrong")
    ]
    assert 1 <= len(lines) < 40  # of as many attempts


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/json", "Sec-Fetch-Site": "cross-site"},
        {"Content-Type": "application/json", "Sec-Fetch-Site": "same-site"},
    ],
)
async def test_page_of_another_site_cannot_sign_in_or_out(
    workers: list[Worker], headers: dict[str, str]
) -> None:
    async with served_dashboard(workers[0], token=TOKEN) as browser:
        for path, body in (("logout", b"{}"), ("login", b'{"token": "x"}')):
            # As a browser: without the cookie, which is for pages of the site alone.
            async with (
                aiohttp.ClientSession(browser.session._base_url) as foreign,  # noqa: SLF001
                foreign.post(browser.url(path), data=body, headers=headers) as answer,
            ):
                assert answer.status == 403
                assert "Set-Cookie" not in answer.headers
        assert await browser.sign_in(SECRET) == 200
        async with browser.session.post(
            browser.url("logout"), data=b"{}", headers=headers
        ) as answer:
            assert answer.status == 403
        assert (await browser.get("api/overview"))[0] == 200
        own = {"Content-Type": "application/json", "Sec-Fetch-Site": "same-origin"}
        async with browser.session.post(
            browser.url("logout"), data=b"{}", headers=own
        ) as answer:
            assert answer.status == 200


@pytest.mark.parametrize("content", [[], {"token": 1}, "text", {"ticket": {}}])
async def test_malformed_login_is_refused(
    workers: list[Worker], content: object
) -> None:
    async with served_dashboard(workers[0]) as browser:
        assert (await browser.post("login", content))[0] == 400


async def test_a_program_sends_the_token(workers: list[Worker]) -> None:
    async with served_dashboard(workers[0], token=TOKEN) as browser:
        assert (await browser.get("login"))[1]["takes"] == "either"
        assert (await browser.get("api/calls", **BEARER))[0] == 200
        wrong = {"Authorization": "Bearer something-else-of-it"}
        assert (await browser.get("api/calls", **wrong))[0] == 401
        assert (await browser.post("login", {"token": TOKEN}))[0] == 200
        of_secret = {"Authorization": f"Bearer {token_of(SECRET)}"}
        assert (await browser.get("api/calls", **of_secret))[0] == 200
        sent = {"Authorization": f"Bearer {SECRET}"}
        assert (await browser.get("api/calls", **sent))[0] == 401


async def test_dashboard_without_a_secret_is_for_this_host_alone() -> None:
    async with Cluster(2) as (a, _), served_dashboard(a) as browser:
        assert (await browser.get("login"))[1]["takes"] == "nothing"
        assert (await browser.get("api/overview"))[0] == 200
        for headers in (
            {"X-Forwarded-For": "10.1.2.3"},
            {"Sec-Fetch-Site": "cross-site"},
            *({"Host": host} for host in FOREIGN_HOSTS),
        ):
            assert (await browser.get("api/overview", **headers))[0] == 401, headers
        for host in ("localhost", "LOCALHOST:80", "127.0.0.1:1", "[::1]", "[::1]:8265"):
            assert (await browser.get("api/overview", Host=host))[0] == 200, host


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("uid", [0, 65534])
async def test_dashboard_without_a_secret_is_for_this_user_alone(uid: int) -> None:
    async with Cluster(2) as (a, _), served_dashboard(a) as browser:
        url = f"{browser.session._base_url}".rstrip("/") + browser.url("api/overview")  # noqa: SLF001
        asking = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-c", ASK_AS, str(uid), url),
            stdout=asyncio.subprocess.PIPE,
        )
        status, _ = await asking.communicate()
        assert int(status) == (401 if uid else 200)


async def test_the_token_is_not_the_secret(workers: list[Worker]) -> None:
    with pytest.raises(UsageError, match="must not be the secret"):
        serving.dashboard(workers[0], token=SECRET)


# --- paths ---------------------------------------------------------------------------


async def test_page_is_served_with_a_strict_content_policy(
    workers: list[Worker],
) -> None:
    async with served_dashboard(workers[0]) as browser:
        async with browser.session.get(browser.url("")) as answer:
            page = await answer.text()
            policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'self'" in policy
        assert answer.headers["Cache-Control"] == "no-store"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert 'src="static/main.js"' in page  # relative: any prefix will do
        async with browser.session.get(browser.url("static/main.js")) as answer:
            assert (answer.status, answer.content_type) == (200, "text/javascript")
        for path in ("static/../__init__.py", "static/none.js", "static/"):
            async with browser.session.get(browser.url(path)) as answer:
                assert answer.status == 404


async def test_path_without_slash_redirects_to_the_directory(
    workers: list[Worker],
) -> None:
    async with served_dashboard(workers[0]) as browser:
        url = browser.url("").rstrip("/")
        async with browser.session.get(url, allow_redirects=False) as answer:
            assert (answer.status, answer.headers["Location"]) == (308, "prefix/")
        async with browser.session.get(url) as answer:
            assert (answer.status, answer.url.path) == (200, PREFIX)


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("overview?sort=nothing", "sort must be one of"),
        ("overview?page=0", "page must be from 1"),
        ("overview?per_page=201", "per_page must be from 1 to 200"),
        ("overview?order=sideways", "order must be one of"),
        ("overview?what=this", "the parameter 'what' is unknown"),
        ("worker", "worker must be given once"),
    ],
)
async def test_invalid_query_is_reported(
    workers: list[Worker], path: str, problem: str
) -> None:
    async with served_dashboard(workers[0], token=TOKEN) as browser:
        for wanted in (path, path.replace("?", "/live?")):
            status, body = await browser.get(f"api/{wanted}", **BEARER)
            assert status == 400
            assert problem in body["error"]


async def test_unknown_worker_or_view_is_404(workers: list[Worker]) -> None:
    async with served_dashboard(workers[0], token=TOKEN) as browser:
        status, body = await browser.get("api/worker?worker=nobody", **BEARER)
        assert status == 404
        assert "there is no worker 'nobody'; known: a, b, c" in body["error"]
        assert (await browser.get("api/nothing", **BEARER))[0] == 404


async def test_worker_that_has_not_started_is_reported() -> None:
    worker = Worker("alone", rank=0, world_size=1, rendezvous="join://localhost:1")
    async with served_dashboard(worker) as browser:
        status, body = await browser.get("api/overview")
        assert status == 503
        assert "does not run" in body["error"]


# --- what is shown -------------------------------------------------------------------


@asynccontextmanager
async def busy(workers: list[Worker]) -> AsyncIterator[None]:
    """Wait for a call, refer to a value, train, and reduce, at once."""
    a, b, _ = workers
    with acting_as(b):  # else the task would be no worker's own
        call = asyncio.ensure_future(b.peer("c").call(wait))
    held = a.peer("b").remote(Held)
    await held.rpc_async().rows()
    async with asyncio.TaskGroup() as tasks:
        for worker in workers:
            tasks.create_task(_reduce(worker))
    await _train(a)
    try:
        yield
    finally:
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        held.release()


async def _reduce(worker: Worker) -> None:
    async with Group(worker, name="all") as group:
        await group.all_reduce(torch.ones(8))


async def _train(worker: Worker) -> None:
    """Do a step of a pipeline, and a backward pass."""
    with acting_as(worker):
        stages = [RemoteModule(to, nn.Linear, (4, 4)) for to in ("b", "c")]
        pipe = await Pipeline(stages, chunks=2)
        optimizer = await DistributedOptimizer(
            torch.optim.SGD, await pipe.remote_parameters(), lr=0.1
        )
        x = torch.ones(8, 4)
        await pipe.train_step(x, x, nn.functional.mse_loss, optimizer)
        async with autograd.context() as context:
            loss = (await stages[0].forward_async(x)).sum()
            await autograd.backward(context, [loss])


async def test_views_show_calls_references_and_training(workers: list[Worker]) -> None:
    async with served_dashboard(workers[0], token=TOKEN) as browser, busy(workers):
        looks = {name: await browser.look(name, **BEARER) for name in LISTS}
        details = await browser.look("worker?worker=b", **BEARER)
    for name, look in looks.items():
        assert look["view"] == name
        assert look["group"] == {"workers": 3, "answering": 3, "silent": 0}
        assert look["total"] == len(look["rows"]) > 0
        assert look["first"] == 1
    check_overview(looks["overview"])
    check_training(looks["training"])
    calls = [row for row in looks["calls"]["rows"] if row["function"] == "wait"]
    assert [(row["caller"], row["callee"]) for row in calls] == [("b", "c")]
    assert [(row["state"], row["kind"]) for row in calls] == [("runs", "call")]
    (held,) = (row for row in looks["references"]["rows"] if row["type"] == "Held")
    assert (held["owner"], held["holders"]) == ("b", ["a"])
    reduced = [
        row for row in looks["collectives"]["rows"] if row["kind"] == "all_reduce"
    ]
    assert [(row["state"], row["came"]) for row in reduced] == [("ok", [0, 1, 2])]
    assert reduced[0]["bytes"] == 32
    assert details["versions"]["torch"] == torch.__version__
    assert details["options"]["secret"] == "given"
    assert {row["peer"] for row in details["links"]} >= {"a", "c"}
    assert any("`wait` on 'c'" in row["waits_for"] for row in details["tasks"])
    assert SECRET not in str(details)


async def test_views_hide_the_dashboards_own_calls(workers: list[Worker]) -> None:
    async with served_dashboard(workers[0], token=TOKEN) as browser:
        for _ in range(2):  # the second would show the calls of the first
            looks = {name: await browser.look(name, **BEARER) for name in LISTS}
            details = await browser.look("worker?worker=b", **BEARER)
    asked = workers[1].parts.recorder.served.recent
    assert any(event.function.startswith("inspection.") for event in asked)
    assert (looks["calls"]["rows"], looks["calls"]["left_out"]) == ([], 0)
    assert "inspection." not in str([looks, details["functions"], details["events"]])
    own = {row["function"] for row in details["functions"]}
    assert own <= {"membership.sync", "membership.take"}, own


def check_overview(look: Any) -> None:
    rows = {row["worker"]: row for row in look["rows"]}
    assert list(rows) == ["a", "b", "c"]  # by rank
    assert {row["state"] for row in rows.values()} <= {"well", "busy"}
    assert rows["a"]["made_per_s"] > 0
    assert rows["a"]["p50_s"] >= 0  # the clock of a simulated network has milliseconds
    assert rows["b"]["calls_under_way"] >= 1
    assert look["totals"]["references"] == sum(
        row["references"] for row in rows.values()
    )
    # All three are of this process, whose memory counts once.
    assert look["totals"]["memory_bytes"] == max(
        row["memory_bytes"] for row in rows.values()
    )
    links = look["links"]
    place = links["workers"].index
    assert links["cells"][place("b")][place("c")]["in_flight"] >= 1
    assert links["cells"][place("b")][place("b")] is None


def check_training(look: Any) -> None:
    assert [entry["worker"] for entry in look["pipeline"]] == ["b", "c"]
    for stage in look["pipeline"]:
        assert [span["kind"] for span in stage["spans"]].count("forward") == 2
        assert all(0 <= span["start_s"] <= span["end_s"] for span in stage["spans"])
    assert 0 <= look["pipeline_step"]["bubble"] < 1
    assert {entry["state"] for entry in look["passes"]} == {"committed"}
    assert [entry["owners"] for entry in look["steps"]] == [["b", "c"]]


async def test_hang_is_drawn_as_stated_by_why() -> None:
    cluster = ProcessCluster(
        ["ps"], name="trainer", method="forkserver", options=SECURED
    )
    async with cluster as a:
        call = asyncio.create_task(evict(a), name="asks")
        async with served_dashboard(a, token=TOKEN, after_s=0.2) as browser:
            hang = await until_hang(browser)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
    nodes = {node["id"]: node for node in hang["nodes"]}
    begun = nodes[hang["edges"][0]["from"]]
    assert (begun["worker"], begun["label"]) == ("trainer", "task `asks`")
    assert hang["at_fault"] in nodes
    in_cycle = [nodes[node]["worker"] for node in hang["cycle"]]
    assert set(in_cycle) == {"ps", "trainer"}
    assert any(
        "hanging.py" in line for value in nodes.values() for line in value["detail"]
    )


async def evict(worker: Worker) -> None:
    """Wait for two locks of another worker, which are taken in two orders."""
    await worker.peer("ps").call(hanging.evict)


async def until_hang(browser: Browser) -> Any:
    """Return the look at the hang of the call that is planted."""
    async with browser.live("hangs/live", **BEARER) as events:
        while True:
            view = await events.look()
            if view["cycle"] and "task `asks`" in view["sentences"][0]:
                return view


# --- streams -------------------------------------------------------------------------


async def test_browsers_share_one_snapshot(workers: list[Worker]) -> None:
    a, b, _ = workers
    asked = b.parts.recorder.served
    async with served_dashboard(a, token=TOKEN) as browser, AsyncExitStack() as stack:
        streams = [
            await stack.enter_async_context(browser.live("overview/live", **BEARER))
            for _ in range(5)
        ]
        times = [
            [(await stream.look())["taken_at_s"] for _ in range(4)]
            for stream in streams
        ]
        seen = set().union(*times)
        questions = [call for call in asked.recent if call.function == SUMMARY]
    # Others may have begun since, but no more than rounds that were shared.
    assert len(set(times[0]) & set(times[1])) >= 1
    assert len(questions) <= len(seen) + 2
    assert all(moments == sorted(moments) for moments in times)


async def test_a_stream_ends_with_the_session(workers: list[Worker]) -> None:
    async with served_dashboard(workers[0], every_s=3600.0) as browser:
        assert await browser.sign_in(SECRET) == 200
        async with browser.live("overview/live") as events:
            await events.look()
            assert (await browser.post("logout", {}))[0] == 200
            await events.until_end()


async def test_shutdown_of_the_application_ends_open_streams(
    workers: list[Worker],
) -> None:
    """The limit of the server, an hour, would let the test hang."""
    app = web.Application()
    app.add_subapp(PREFIX, serving.dashboard(workers[0], token=TOKEN, every_s=3600.0))
    runner = web.AppRunner(app, shutdown_timeout=3600.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    async with aiohttp.ClientSession(f"http://{host}:{port}") as session:
        browser = Browser(session, PREFIX)
        async with browser.live("overview/live", **BEARER) as events:
            await events.look()
            ending = asyncio.ensure_future(runner.cleanup())
            await events.until_end()
            await ending


async def test_streams_are_limited(workers: list[Worker]) -> None:
    async with (
        served_dashboard(workers[0], token=TOKEN, every_s=3600.0) as browser,
        AsyncExitStack() as stack,
    ):
        for _ in range(STREAMS_OF_ONE_MAX):
            await stack.enter_async_context(browser.live("overview/live", **BEARER))
        status, answer = await browser.get("api/overview/live", **BEARER)
        assert status == 429
        assert "the limit" in answer["error"]


# --- workers in processes ------------------------------------------------------------


async def test_hanging_or_dead_worker_delays_no_other() -> None:
    cluster = ProcessCluster(["b", "c"], method="forkserver", options=SECURED)
    async with cluster as a, served_dashboard(a, token=TOKEN) as browser:
        blocked = asyncio.ensure_future(a.peer("b").call(hanging.sleep_on_the_loop, 60))
        async with browser.live("overview/live", **BEARER) as events:
            await until_state(events, "b", "stalled")
            cluster.kill("c")
            await until_gone(events, "c")
        look = await browser.look("worker?worker=b", **BEARER)
        assert look["trouble"] == "blocked"
        assert "sleep_on_the_loop" in look["why"]
        blocked.cancel()
        await asyncio.gather(blocked, return_exceptions=True)
        cluster.kill("b")


async def until_state(events: Events, name: str, state: str) -> None:
    while True:
        rows = {row["worker"]: row for row in (await events.look())["rows"]}
        assert rows["a"]["state"] in ("well", "busy")
        if rows[name]["state"] == state:
            return


async def until_gone(events: Events, name: str) -> None:
    """Wait until a worker is stopped, or no member any more."""
    while True:
        rows = {row["worker"]: row for row in (await events.look())["rows"]}
        if name not in rows or rows[name]["state"] == "stopped":
            return
