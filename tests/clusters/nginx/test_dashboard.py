"""The dashboard behind Debian's nginx: a prefix stripped, added, and passed on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from asyncrpc import Options, Worker, serving
from asyncrpc.serving.listening import listening
from asyncrpc.testing import Cluster
from tests.clusters.nginx.server import Nginx
from tests.clusters.server_process import missing_programs
from tests.integration.serving.looking_in import Browser

pytestmark = pytest.mark.skipif(
    bool(missing_programs("nginx")), reason="nginx or setpriv is missing here"
)

SECRET: Final = "a secret of this test"
SECURED: Final = Options(secret=SECRET, drain_timeout_s=0.0)
PLACES: Final = ("/stripped/", "/added/", "/deep/inside/")


@pytest_asyncio.fixture
async def workers() -> AsyncIterator[list[Worker]]:
    async with Cluster(3, options=SECURED) as cluster:
        yield list(cluster)


@pytest_asyncio.fixture
async def site(workers: list[Worker], tmp_path: Path) -> AsyncIterator[str]:
    """The URL of nginx, with two dashboards behind it."""
    every_s = 3600.0  # the second look of a stream would take an hour
    bare = serving.dashboard(workers[0], every_s=every_s)
    app = web.Application()
    app.add_subapp("/deep/inside", serving.dashboard(workers[1], every_s=every_s))
    async with (
        listening("the test", bare, "127.0.0.1", 0) as bare_port,
        listening("the test", app, "127.0.0.1", 0) as mounted_port,
    ):
        nginx = Nginx(tmp_path, bare=bare_port, mounted=mounted_port)
        await asyncio.to_thread(nginx.__enter__)
        try:
            yield nginx.url
        finally:
            await asyncio.to_thread(nginx.__exit__)


@pytest_asyncio.fixture
async def jar() -> aiohttp.CookieJar:
    """What keeps cookies also of a host that is a number."""
    return aiohttp.CookieJar(unsafe=True)


@pytest.mark.parametrize("place", PLACES)
async def test_page_signs_in_behind_nginx(
    site: str, place: str, jar: aiohttp.CookieJar
) -> None:
    async with aiohttp.ClientSession(site, cookie_jar=jar) as session:
        browser = Browser(session, place)
        async with session.get(place) as answer:
            page = await answer.text()
            assert answer.status == 200
            assert "default-src 'self'" in answer.headers["Content-Security-Policy"]
        assert 'src="static/main.js"' in page
        async with session.get(f"{place}static/main.js") as answer:
            assert answer.status == 200
        assert (await browser.get("api/overview"))[0] == 401
        assert await browser.sign_in(SECRET) == 200
        look = await browser.look("overview?per_page=2")
        assert [row["worker"] for row in look["rows"]] == ["a", "b"]
        assert (await browser.post("logout", {}))[0] == 200
        assert (await browser.get("api/overview"))[0] == 401


@pytest.mark.parametrize("place", PLACES)
async def test_event_passes_nginx_without_buffering(
    site: str, place: str, jar: aiohttp.CookieJar
) -> None:
    """If nginx waited for a full buffer the first look would come in hours."""
    async with aiohttp.ClientSession(site, cookie_jar=jar) as session:
        browser = Browser(session, place)
        assert await browser.sign_in(SECRET) == 200
        async with browser.live("overview/live") as events:
            look = await events.look()
            assert look["group"]["answering"] == 3
            assert (await browser.post("logout", {}))[0] == 200
            await events.until_end()  # which comes through as well


async def test_session_is_valid_for_its_own_path_only(
    site: str, jar: aiohttp.CookieJar
) -> None:
    async with aiohttp.ClientSession(site, cookie_jar=jar) as session:
        assert await Browser(session, "/stripped/").sign_in(SECRET) == 200
        assert (await Browser(session, "/stripped/").get("api/calls"))[0] == 200
        assert (await Browser(session, "/added/").get("api/calls"))[0] == 401


async def test_path_without_slash_redirects_behind_nginx(site: str) -> None:
    async with aiohttp.ClientSession(site) as session:
        for place in ("/stripped", "/added", "/deep/inside"):
            async with session.get(place) as answer:
                assert answer.status == 200
                assert answer.url.path == f"{place}/"


async def test_group_without_a_secret_is_refused_behind_a_proxy(tmp_path: Path) -> None:
    """Behind a proxy that says for whom it asks, all would seem to be of this host."""
    async with Cluster(2) as (a, b):
        app = web.Application()
        app.add_subapp("/deep/inside", serving.dashboard(b))
        async with (
            listening("the test", serving.dashboard(a), "127.0.0.1", 0) as bare,
            listening("the test", app, "127.0.0.1", 0) as mounted,
        ):
            nginx = Nginx(tmp_path, bare=bare, mounted=mounted)
            await asyncio.to_thread(nginx.__enter__)
            try:
                async with aiohttp.ClientSession(nginx.url) as session:
                    browser = Browser(session, "/deep/inside/")
                    status, body = await browser.get("api/overview")
            finally:
                await asyncio.to_thread(nginx.__exit__)
    assert status == 401
    assert "has no secret" in body["error"]
