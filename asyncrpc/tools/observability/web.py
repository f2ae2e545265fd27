"""The metrics of a worker over HTTP: in an application, by ASGI, or at a port.

A request gets the text, and cannot change anything.  The text is written in a thread,
for one request at a time, so that neither the loop nor its calls wait for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

from aiohttp import web

from asyncrpc.core.arguments import check_kind, wrong
from asyncrpc.core.loop.loops import loop_for
from asyncrpc.core.worker import Worker
from asyncrpc.errors import UsageError
from asyncrpc.serving.aiohttp_app.app import WORKER, WorkerKey
from asyncrpc.serving.listening import check_where, listening
from asyncrpc.serving.paths import check_path
from asyncrpc.tools.observability.metrics import Metrics, MetricsText, check_options

AsgiMessage: TypeAlias = MutableMapping[str, Any]
AsgiApp: TypeAlias = Callable[
    [
        AsgiMessage,
        Callable[[], Awaitable[AsgiMessage]],
        Callable[[AsgiMessage], Awaitable[None]],
    ],
    Awaitable[None],
]


class _Scrapes:
    """Answers requests for metrics, one at a time.

    Attributes:
        metrics: of the worker; None while the application does not run.
    """

    def __init__(self, metrics: Metrics | None = None) -> None:
        self.metrics = metrics
        self._turn = asyncio.Lock()

    async def text(self, accept: str) -> MetricsText | None:
        """Return the text; None while there are no metrics."""
        async with self._turn:
            metrics = self.metrics
            if metrics is None:
                return None
            return await asyncio.to_thread(metrics.text, accept)

    async def get(self, request: web.Request) -> web.Response:
        """Answer a request to an aiohttp application."""
        exposition = await self.text(request.headers.get("Accept", ""))
        if exposition is None:
            raise web.HTTPServiceUnavailable
        headers = {"Content-Type": exposition.content_type}
        return web.Response(body=exposition.body, headers=headers)


def add_metrics(
    app: web.Application,
    worker: Worker | WorkerKey = WORKER,
    *,
    path: str = "/metrics",
    peers_max: int = 0,
    with_process: bool = False,
) -> None:
    """Count the metrics of a worker while an application runs, and show them there.

    `path` answers GET and HEAD.  If clients must not see the metrics, put your own
    middleware before it, or use `serve_metrics`.

    Args:
        app: an application that has not been started.
        worker: the worker; or the key under which the application stores it: then call
            this after `app.cleanup_ctx.append(serving.worker_context(...))`.
        path: of the route.
        peers_max: as for `Metrics`.
        with_process: as for `Metrics`.

    Raises:
        UsageError: an argument has the wrong type, prometheus_client is needed and not
            installed, `app` has been started, or has another route at `path`.  When the
            application starts: it has no worker under the key.

    Example:
        >>> app.cleanup_ctx.append(serving.worker_context(make_worker))
        >>> observability.add_metrics(app)
    """
    check_kind("app", app, web.Application, "a web.Application")
    check_kind("worker", worker, (Worker, web.AppKey), "a Worker, or a web.AppKey")
    check_path("path", path)
    check_options(peers_max, with_process)
    scrapes = _Scrapes()

    async def counting(app: web.Application) -> AsyncIterator[None]:
        metered = worker if isinstance(worker, Worker) else app.get(worker)
        if metered is None:
            raise UsageError(
                "the application has no worker under this key: append "
                "serving.worker_context(...) to app.cleanup_ctx before add_metrics"
            )
        metrics = Metrics(metered, peers_max=peers_max, with_process=with_process)
        with metrics as scrapes.metrics:
            yield
        scrapes.metrics = None

    try:
        app.router.add_get(path, scrapes.get)
        app.cleanup_ctx.append(counting)
    except (RuntimeError, ValueError) as error:
        raise UsageError(
            f"app takes no route {path[:255]!r} for metrics: {error}"
        ) from error


def metrics_asgi(metrics: Metrics) -> AsgiApp:
    """Return an ASGI application that answers GET and HEAD with metrics, at any path.

    Mount it in yours; it depends on no framework.

    Args:
        metrics: count while their `with` block runs.

    Returns:
        An application of ASGI 3.

    Raises:
        UsageError: `metrics` is not a Metrics.

    Example:
        >>> with observability.Metrics(worker) as metrics:
        ...     app.mount("/metrics", observability.metrics_asgi(metrics))

    Source: https://asgi.readthedocs.io/en/latest/specs/main.html
    """
    check_kind("metrics", metrics, Metrics, "a Metrics")
    scrapes = _Scrapes(metrics)

    async def app(
        scope: AsgiMessage,
        receive: Callable[[], Awaitable[AsgiMessage]],
        send: Callable[[AsgiMessage], Awaitable[None]],
    ) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, send)
        elif scope["type"] == "http":
            await _answer(scrapes, scope, send)
        else:
            await send({"type": "websocket.close"})

    return app


async def _live(
    receive: Callable[[], Awaitable[AsgiMessage]],
    send: Callable[[AsgiMessage], Awaitable[None]],
) -> None:
    """Start and end with the server, as its only application."""
    kind = ""
    while kind != "lifespan.shutdown":
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})


async def _answer(
    scrapes: _Scrapes,
    scope: AsgiMessage,
    send: Callable[[AsgiMessage], Awaitable[None]],
) -> None:
    status, headers, body = 405, [(b"allow", b"GET, HEAD")], b""
    if scope["method"] in {"GET", "HEAD"}:
        accept = [value for name, value in scope["headers"] if name == b"accept"]
        exposition = await scrapes.text(b",".join(accept).decode("latin-1"))
        assert exposition is not None  # these always have their metrics
        status, body = 200, exposition.body
        headers = [
            (b"content-type", exposition.content_type.encode()),
            (b"content-length", str(len(body)).encode()),
        ]
        body = body if scope["method"] == "GET" else b""
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def serve_metrics(
    worker: Worker,
    *,
    port: int,
    host: str = "127.0.0.1",
    path: str = "/metrics",
    peers_max: int = 0,
    with_process: bool = False,
) -> AsyncIterator[int]:
    """Count the metrics of a worker, and show them at a port, while the block runs.

    The port has no authentication and no encryption, so by default it listens only at
    loopback, where a request must name `localhost` or a loopback address as its host: a
    page of another site cannot read it.

    This need not run on the worker's loop: on the loop of another thread, it answers
    even while the worker's loop is blocked.

    Args:
        worker: the worker, started or not.
        port: to listen at; 0: a free one.
        host: address of the interface to listen at; an empty string: all of them.
        path: of the metrics; other paths are not found.
        peers_max: as for `Metrics`.
        with_process: as for `Metrics`.

    Returns:
        A context with the port.

    Raises:
        UsageError: an argument has the wrong type, prometheus_client is needed and not
            installed, the port cannot be listened at, or no event loop runs here.

    Cancellation:
        The port is closed, and nothing is counted any more.

    Example:
        >>> async with observability.serve_metrics(worker, port=9400), worker:
        ...     await train()
    """
    loop_for("serve_metrics")
    check_where(host, port)
    check_path("path", path)
    metrics = Metrics(worker, peers_max=peers_max, with_process=with_process)
    app = web.Application()
    try:
        app.router.add_get(path, _Scrapes(metrics).get)
    except ValueError as error:
        raise wrong("path", "a path that aiohttp can route", path) from error
    async with listening("serve_metrics", app, host, port) as bound_port:
        with metrics:
            yield bound_port
