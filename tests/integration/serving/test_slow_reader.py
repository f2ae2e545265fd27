"""A browser that does not read its stream: over a raw socket, against a real server."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

import aiohttp
import pytest
import uvloop
from aiohttp import web

from asyncrpc import Options, Worker, serving
from asyncrpc.serving.dashboard import application
from asyncrpc.testing import Cluster
from tests.integration.serving.looking_in import Browser, Held

SECRET: Final = "a secret of this test"
TOKEN: Final = "a-token-of-this-test"
BEARER: Final = {"Authorization": f"Bearer {TOKEN}"}
SECURED: Final = Options(secret=SECRET, drain_timeout_s=0.0)
REFERENCES: Final = 200  # a look at them has some 60 KB
PATH: Final = "references/live?per_page=200"
# What a connection holds of what is not read: at more the writer waits, so that one
# look may be above that.
WRITTEN_MAX: Final = 64 << 10
BUFFERED_MAX: Final = WRITTEN_MAX + (128 << 10)
LIMIT_S: Final = 120.0  # that only a failure reaches


class Served:
    """A dashboard that is served, and its connections.

    Attributes:
        browser: that reads.
    """

    def __init__(self, runner: web.AppRunner, browser: Browser) -> None:
        self._runner = runner
        self.browser = browser

    @property
    def port(self) -> int:
        port: int = self._runner.addresses[0][1]
        return port

    def buffered(self, client: SlowReader) -> int | None:
        """Return what waits to be sent to a client; None: the server has left it."""
        transport = self._transport_to(client)
        return None if transport is None else transport.get_write_buffer_size()

    def is_stuck(self, client: SlowReader) -> bool:
        """Return whether what a client does not read has come up to the server."""
        transport = self._transport_to(client)
        if transport is None:
            return False
        # The system's buffer is to be full soon.
        buffer = transport.get_extra_info("socket")
        buffer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return transport.get_write_buffer_size() > WRITTEN_MAX

    def _transport_to(self, client: SlowReader) -> asyncio.Transport | None:
        server = self._runner.server
        assert server is not None
        for connection in server.connections:
            transport = connection.transport
            if transport is None or transport.is_closing():
                continue
            if transport.get_extra_info("peername")[1] == client.port:
                return transport
        return None


class SlowReader:
    """A client that has asked for a stream, and reads when it is told to."""

    def __init__(self, to_port: int, headers: dict[str, str]) -> None:
        self._socket = socket.socket()
        # Small, so that little is on its way between the two.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._socket.settimeout(LIMIT_S)
        self._socket.connect(("127.0.0.1", to_port))
        lines = [f"GET /api/{PATH} HTTP/1.1", "Host: localhost"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self._socket.sendall("\r\n".join([*lines, "", ""]).encode())
        self.port: int = self._socket.getsockname()[1]

    def read_beyond(self, at_s: float) -> list[Any]:
        """Read on until a look is newer than a moment; blocks this thread."""
        looks: list[Any] = []
        with self._socket.makefile("rb") as lines:
            for line in lines:
                if line.startswith(b"data: "):
                    looks.append(json.loads(line.removeprefix(b"data: ")))
                    if looks[-1]["taken_at_s"] > at_s:
                        break
        return looks

    def close(self) -> None:
        self._socket.close()


@asynccontextmanager
async def served_dashboard(worker: Worker) -> AsyncIterator[Served]:
    app = serving.dashboard(worker, token=TOKEN, every_s=0.1)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
    try:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        jar = aiohttp.CookieJar(unsafe=True)  # keeps cookies of hosts that are numbers
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with aiohttp.ClientSession(url, cookie_jar=jar) as session:
            yield Served(runner, Browser(session))
    finally:
        await runner.cleanup()


@asynccontextmanager
async def many_references() -> AsyncIterator[Worker]:
    """A worker of a group, whose looks are large."""
    async with Cluster(2, options=SECURED) as (a, b):
        held = [a.peer(b.name).remote(Held) for _ in range(REFERENCES)]
        await asyncio.gather(*(reference.rpc_async().rows() for reference in held))
        yield a
        for reference in held:
            reference.release()


@asynccontextmanager
async def reader(served: Served, **headers: str) -> AsyncIterator[SlowReader]:
    slow_reader = await asyncio.to_thread(SlowReader, served.port, headers)
    try:
        yield slow_reader
    finally:
        slow_reader.close()


async def until(served: Served, is_so: Callable[[], bool]) -> list[Any]:
    """Look on, as another browser, until something is so; return the looks."""
    looks = []
    async with asyncio.timeout(LIMIT_S):
        async with served.browser.live(PATH, **BEARER) as events:
            while not is_so():
                looks.append(await events.look())
    return looks


class TestSlowReader:
    """What matters is the server: on uvloop, as programs have it."""

    loops = {"uvloop": uvloop.new_event_loop}  # noqa: RUF012

    async def test_slow_reader_misses_looks_and_delays_no_other(self) -> None:
        async with (
            many_references() as worker,
            served_dashboard(worker) as served,
            reader(served, **BEARER) as slow,
        ):
            await until(served, lambda: served.is_stuck(slow))
            others = list[Any]()
            async with served.browser.live(PATH, **BEARER) as events:
                while len(others) < 20:
                    others.append(await events.look())
            times = [look["taken_at_s"] for look in others]
            assert times == sorted(set(times))  # each is another one
            waiting = served.buffered(slow)  # no more than before all of these looks
            assert waiting is not None
            assert waiting < BUFFERED_MAX
            # Reading again, it has whole looks: those on their way, and the newest.
            looks = await asyncio.to_thread(slow.read_beyond, times[-1])
            read = [look["taken_at_s"] for look in looks]
            assert read == sorted(set(read))
            assert {look["view"] for look in looks} == {"references"}
            assert set(times) - set(read)  # it has missed some

    async def test_slow_reader_is_dropped_when_its_session_ends(self) -> None:
        async with many_references() as worker, served_dashboard(worker) as served:
            assert await served.browser.sign_in(SECRET) == 200
            (cookie,) = served.browser.session.cookie_jar
            cookies = {"Cookie": f"{cookie.key}={cookie.value}"}
            async with reader(served, **cookies) as slow:
                await until(served, lambda: served.is_stuck(slow))
                assert (await served.browser.post("logout", {}))[0] == 200
                await until(served, lambda: served.buffered(slow) is None)

    async def test_slow_reader_is_dropped_when_it_leaves(self) -> None:
        async with many_references() as worker, served_dashboard(worker) as served:
            async with reader(served, **BEARER) as slow:
                await until(served, lambda: served.is_stuck(slow))
            await until(served, lambda: served.buffered(slow) is None)

    async def test_stalled_reader_is_dropped_after_a_while(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(application, "STALLED_S", 0.5)
        async with (
            many_references() as worker,
            served_dashboard(worker) as served,
            reader(served, **BEARER) as slow,
        ):
            await until(served, lambda: served.is_stuck(slow))
            await until(served, lambda: served.buffered(slow) is None)

    async def test_slow_reader_does_not_delay_the_shutdown(self) -> None:
        async with (
            AsyncExitStack() as stack,
            many_references() as worker,
            served_dashboard(worker) as served,
        ):
            slow = await stack.enter_async_context(reader(served, **BEARER))
            await until(served, lambda: served.is_stuck(slow))
