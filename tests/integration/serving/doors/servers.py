"""Real servers in this process, each on a free port of loopback."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing

import aiohttp
import hypercorn.asyncio
import hypercorn.config
import uvicorn
from aiohttp import web

from asyncrpc.serving.asgi.machine.connection import AsgiApplication
from tests.integration.serving.doors.clients import BUFFER_BYTES


@asynccontextmanager
async def run_aiohttp(app: web.Application) -> AsyncIterator[int]:
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
    try:
        await runner.setup()
        await web.SockSite(runner, listener()).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


def listener() -> socket.socket:
    server_socket = socket.create_server(("127.0.0.1", 0))
    # Of each connection; so that a client which does not read is soon noticed.
    server_socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    server_socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
    server_socket.settimeout(0)
    return server_socket


class UvicornServer(uvicorn.Server):
    """One that says when it has started."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.has_started = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.has_started.set()


@asynccontextmanager
async def run_uvicorn(app: AsgiApplication, *, http: str) -> AsyncIterator[int]:
    config = uvicorn.Config(
        app, http=http, lifespan="on", log_config=None, timeout_graceful_shutdown=1
    )
    server = UvicornServer(config)
    with closing(listener()) as listening:
        port: int = listening.getsockname()[1]
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        try:
            started = asyncio.create_task(server.has_started.wait())
            await asyncio.wait((started, serving), return_when=asyncio.FIRST_COMPLETED)
            started.cancel()
            yield port
        finally:
            server.should_exit = True
            await serving


@asynccontextmanager
async def uvicorn_client(
    app: AsgiApplication, *, http: str
) -> AsyncIterator[aiohttp.ClientSession]:
    """Serve an application; the client's paths are relative to it."""
    async with (
        run_uvicorn(app, http=http) as port,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client,
    ):
        yield client


@asynccontextmanager
async def run_hypercorn(app: AsgiApplication) -> AsyncIterator[int]:
    config = hypercorn.config.Config()
    config.graceful_timeout = 1.0
    config.errorlog = config.accesslog = None
    end = asyncio.Event()
    listening = listener()
    port: int = listening.getsockname()[1]
    config.bind = [f"fd://{listening.detach()}"]  # the server closes it
    serving = asyncio.create_task(
        hypercorn.asyncio.serve(app, config, shutdown_trigger=end.wait)  # type: ignore[arg-type]
    )
    try:
        yield port
    finally:
        end.set()
        await serving
