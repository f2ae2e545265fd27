"""HTTP: whoever asks gets an answer that is no fault of ours, and only what is for it.

Choices make requests to two dashboards of one worker, which take a token and a secret,
to its metrics, and to its health.  Each has the form of HTTP; the path, the query, the
headers and the content are hostile.  Nobody without the token sees a look, no answer
has the status 500, nothing is logged as a fault, and who has the token is answered.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Iterator
from typing import Any, Final, Self
from urllib.parse import quote

from aiohttp import web

from asyncrpc import Options, serving
from asyncrpc.observability import add_metrics
from asyncrpc.testing import Cluster
from tests.fuzz.choices import Choices
from tests.fuzz.hostile_world import Complaints

TOKEN: Final = "a token of the honest ones"
SECRET: Final = "a secret of the honest ones"
ANSWER_S: Final = 20.0
NOT_HTTP: Final = "aiohttp.http_exceptions."  # what aiohttp logs of a request
REQUESTS_MAX: Final = 6
VIEWS: Final = (
    *("overview", "worker", "calls", "references", "training", "collectives", "hangs"),
    *("", "no", "..", "x" * 300),
)
PATHS: Final = (
    *("", "/", "/login", "/logout", "/static/page.js", "/static/../access.py"),
    *("/static/%2e%2e/access.py", "/static//etc/passwd", "/static/" + "a/" * 200),
    *("/static/%00", "/%ff", "//evil.example/", "/api", "/api/x/y", "/é"),
)
METHODS: Final = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "TRACE", "X" * 40)
NAMES: Final = (
    *("sort", "order", "page", "per_page", "worker", "find", "thorough", "pid", ""),
)
TEXTS: Final = (
    *("", "0", "1", "-1", "1e9", "9" * 400, "٣", "nan", "up", "down", "name", "calls"),
    *("w0", "\0", "\ud800", "é", "a" * 5000, "%", "&=", "<script>", "'", "\r\nX: y"),
    *("proof", "token", "ticket", TOKEN[:-1], "null", "127.0.0.1"),
)
HEADERS: Final = (
    *("Host", "Authorization", "Cookie", "Content-Type", "Accept", "Origin", "Range"),
    *("Sec-Fetch-Site", "X-Forwarded-For", "If-None-Match", "If-Modified-Since"),
    *("Accept-Encoding", "Expect", "Upgrade", "Last-Event-ID", "Referer"),
)
VALUES: Final = (
    *("localhost", "evil.example", "Bearer ", "Bearer é", "Basic eDp5", "chunked"),
    *(f"Bearer {TOKEN[:-1]}", "asyncrpc_dashboard=x", "asyncrpc_dashboard=" + "é" * 99),
    *("application/json", "application/json; charset=no", "text/plain", "multipart/x"),
    *("*/*", "application/openmetrics-text;version=9", "text/html;q=no", "gzip;q=-1"),
    *("same-origin", "cross-site", "none", "bytes=0-", "bytes=9-1", "*", '"x"'),
    *("100-continue", "websocket", "Sun, 99 Nov 9999 99:99:99 GMT", "x" * 9000, ""),
)


class Applications:
    """One worker, and all that shows something of it by HTTP."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.complaints = Complaints()
        self.loop.set_exception_handler(self.complaints.on_loop)
        for name in ("asyncrpc", "aiohttp", "asyncio"):
            logging.getLogger(name).addHandler(self.complaints)
            logging.getLogger(name).propagate = False

    async def start(self) -> None:
        self._cluster = Cluster(1, options=Options(secret=SECRET, drain_timeout_s=0.0))
        (worker,) = await self._cluster.__aenter__()
        app = web.Application()
        for path, token in {"/token": TOKEN, "/secret": None}.items():
            app.add_subapp(path, serving.dashboard(worker, token=token, every_s=0.1))
        app[serving.WORKER] = worker
        app.add_routes(serving.health_routes())
        add_metrics(app, worker)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()

    async def stop(self) -> None:
        await self._runner.cleanup()
        await self._cluster.__aexit__(None, None, None)

    def close(self) -> None:
        self.loop.run_until_complete(self.stop())
        self.loop.close()
        for name in ("asyncrpc", "aiohttp", "asyncio"):
            logging.getLogger(name).removeHandler(self.complaints)
            logging.getLogger(name).propagate = True

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        """Send the bytes of a request; return the status and what follows it."""
        ours, theirs = socket.socketpair()
        server = self._runner.server
        assert server is not None
        await self.loop.create_connection(server, sock=theirs)
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            writer.write(request)
            async with asyncio.timeout(ANSWER_S):
                head = await reader.readuntil(b"\r\n\r\n")
                status = int(head.split(b" ", 2)[1])
                if status == 100:
                    head = await reader.readuntil(b"\r\n\r\n")
                    status = int(head.split(b" ", 2)[1])
                is_stream = b"text/event-stream" in head
                return status, b"" if is_stream else await reader.read()
        except asyncio.IncompleteReadError:
            return 0, b""  # the server closed the connection
        finally:
            writer.transport.abort()
            await asyncio.sleep(0)


def request_of(choices: Choices) -> tuple[bytes, str]:
    """Return a request of the right form, and its path."""
    method = METHODS[choices.below(len(METHODS))]
    where = ("/token", "/secret", "/metrics", "/healthz", "/readyz", "")
    path = where[choices.below(len(where))]
    if path in ("/token", "/secret"):
        how = choices.below(len(PATHS) + 8)
        view = VIEWS[choices.below(len(VIEWS))]
        path += PATHS[how] if how < len(PATHS) else f"/api/{view}"
        path += "/live" if how >= len(PATHS) + 6 else ""
    query = "&".join(
        f"{NAMES[choices.below(len(NAMES))]}={_quoted(choices)}"
        for _ in range(choices.below(4))
    )
    target = (path or "/") + (f"?{query}" if query else "")
    headers = ["Host: localhost", "Connection: close"]
    for _ in range(choices.below(5)):
        name = HEADERS[choices.below(len(HEADERS))]
        headers.append(f"{name}: {VALUES[choices.below(len(VALUES))]}")
    body = _body(choices)
    if body or choices.below(2):
        headers.append("Content-Type: application/json")
        headers.append(f"Content-Length: {len(body)}")
    head = "\r\n".join((f"{method} {target} HTTP/1.1", *headers, "", ""))
    return head.encode() + body, path


def _quoted(choices: Choices) -> str:
    text = TEXTS[choices.below(len(TEXTS))]
    return quote(text.encode(errors="surrogatepass"))


def _body(choices: Choices) -> bytes:
    how = choices.below(5)
    if how == 0:
        return b""
    if how == 1:
        return choices.take(40)
    if how == 2:
        return b"[" * (1 + choices.below(256) * 80)
    names = ("proof", "token", "ticket")
    fields: dict[str, Any] = {
        names[choices.below(len(names))]: TEXTS[choices.below(len(TEXTS))]
        for _ in range(choices.below(4))
    }
    if how == 4:
        fields[TEXTS[choices.below(len(TEXTS))]] = choices.below(2) or [None]
    return json.dumps(fields).encode()


class Setting:
    """The applications run while it is entered."""

    running: Applications

    def __enter__(self) -> Self:
        Setting.running = applications = Applications()
        applications.loop.run_until_complete(applications.start())
        return self

    def __exit__(self, *_: object) -> None:
        self.running.close()


setting = Setting


def check(data: bytes) -> None:
    """Ask, and let one who has the token ask afterwards."""
    applications, choices = Setting.running, Choices(data)

    async def play() -> None:
        for _ in range(REQUESTS_MAX):
            if not choices:
                break
            request, path = request_of(choices)
            status, content = await applications.ask(request)
            assert status not in (500, 501), (request, content)
            assert status != 200 or "/api" not in path, (request, content)
            assert TOKEN.encode() not in content
            assert SECRET.encode() not in content
        honest = (
            "GET /token/api/overview HTTP/1.1\r\nHost: localhost\r\n"
            f"Connection: close\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
        )
        status, content = await applications.ask(honest.encode())
        assert status == 200, content
        faults = [
            complaint
            for complaint in applications.complaints.take()
            if NOT_HTTP not in complaint
        ]
        assert not faults, faults

    applications.loop.run_until_complete(play())


def seeds() -> Iterator[bytes]:
    """Give requests to each application, with and without what signs in."""
    for where in range(6):
        yield bytes([0, where, 21, 0, 0, 0, 0, 0])
    for view in range(len(VIEWS)):
        yield bytes([0, 0, 17, view, 2, 0, 1, 4, 9, 1, 1, 2, 0, 0])
        yield bytes([0, 1, 24, view, 0, 0, 0, 0])
    for text in range(len(TEXTS)):
        yield bytes([1, 0, 2, 0, 0, 0, 3, 2, 0, text, 1, text, 0])
        yield bytes([1, 1, 2, 0, 0, 0, 4, 1, 2, text, text, 1, 0])
    for header in range(len(HEADERS)):
        yield bytes([0, 0, 2, 0, 0, 2, header, 6, header, 7, 0, 0])
