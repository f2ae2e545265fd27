"""An application on a real socket, and a worker behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import aiohttp
import pytest
from aiohttp import web

from asyncrpc import LocalRendezvous, Options, Worker
from tests.integration.serving import remote

QUICK = Options(drain_timeout_s=0.5)

Serving: TypeAlias = Callable[
    [web.Application], AbstractAsyncContextManager[aiohttp.ClientSession]
]


@asynccontextmanager
async def serve(app: web.Application) -> AsyncIterator[aiohttp.ClientSession]:
    """Serve on loopback; the client's paths are relative to the server."""
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
    try:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        async with aiohttp.ClientSession(f"http://{host}:{port}") as client:
            yield client
    finally:
        await runner.cleanup()


@pytest.fixture
def serving_app() -> Serving:
    return serve


@dataclass
class Group:
    """Two workers: `front` belongs to the application, `back` runs already."""

    name: str
    meeting: LocalRendezvous = field(default_factory=lambda: LocalRendezvous(1))
    back: Worker = field(init=False)

    def front(self, name: str = "front", rank: int = 1) -> Worker:
        return Worker(name, rank=rank, rendezvous=self.meeting, options=QUICK)

    @property
    def watch(self) -> remote.Watch:
        return remote.watches[self.name]


@pytest.fixture
async def group(request: pytest.FixtureRequest) -> AsyncIterator[Group]:
    created = Group(request.node.name)
    remote.watches[created.name] = remote.Watch()
    created.back = Worker("back", rank=0, rendezvous=created.meeting, options=QUICK)
    async with created.back:
        yield created
    del remote.watches[created.name]
