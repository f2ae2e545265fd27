"""Worker processes that run on a loop of one's choice; else they run on uvloop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from asyncrpc.testing import cluster
from tests.integration.core import short_of_memory

_serve = cluster._serve  # noqa: SLF001  (what runs in the processes)


def serve_on_asyncio(rank: int, seat: Any) -> None:
    asyncio.run(_serve_and_lift(rank, seat))


async def _serve_and_lift(rank: int, seat: Any) -> None:
    await _serve(rank, seat)
    short_of_memory.lift()  # asyncio starts a thread to end its executor


@contextmanager
def processes_on(loop: str) -> Iterator[None]:
    """Let the processes of a `ProcessCluster` run on `asyncio` or on `uvloop`."""
    serve = serve_on_asyncio if loop == "asyncio" else _serve
    with mock.patch.object(cluster, "_serve", serve):
        yield


def kind_of_loop() -> str:
    """Return which kind of loop runs here."""
    module = type(asyncio.get_running_loop()).__module__
    return "uvloop" if module.startswith("uvloop") else "asyncio"
