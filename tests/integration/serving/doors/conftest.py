"""Each test of this folder runs on every door: a framework on a server, all real."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest

from tests.integration.serving.doors import applications, servers
from tests.integration.serving.doors.neutral import NeutralApp

ITEM_LENGTH: Final = 16 << 10
# 64 KiB in the server, 128 KiB in each of two kernels, 16 items of credit: 36 items.
HELD_MAX: Final = 100


def kernel_bytes_max() -> int:
    """Return what the kernel buffers for a sender who sets no limit."""
    path = Path("/proc/sys/net/ipv4/tcp_wmem")
    return int(path.read_text("utf-8").split()[2]) if path.exists() else 4 << 20


@dataclass(frozen=True)
class Door:
    """A framework on a server.

    Attributes:
        name: of both.
        make: makes the application of the framework.
        run: serves it while a context lasts; its value is the port.
    """

    name: str
    make: Callable[[NeutralApp], Any]
    run: Callable[[Any], AbstractAsyncContextManager[int]]

    @asynccontextmanager
    async def serve(self, neutral: NeutralApp) -> AsyncIterator[aiohttp.ClientSession]:
        """Serve an application; paths of the client are relative to it."""
        async with (
            self.run(self.make(neutral)) as port,
            aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client,
        ):
            yield client


DOORS: Final = (
    Door("aiohttp", applications.aiohttp_app, servers.run_aiohttp),
    Door(
        "starlette-uvicorn",
        applications.starlette_app,
        lambda app: servers.run_uvicorn(app, http="httptools"),
    ),
    Door(
        "fastapi-uvicorn",
        applications.fastapi_app,
        lambda app: servers.run_uvicorn(app, http="h11"),
    ),
    Door("bare-hypercorn", applications.bare_app, servers.run_hypercorn),
)


@pytest.fixture(params=DOORS, ids=lambda door: door.name)
def door(request: pytest.FixtureRequest) -> Door:
    chosen: Door = request.param
    return chosen
