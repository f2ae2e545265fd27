"""The workers that are used wrongly, and a count of what they send."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from asyncrpc import Options, Policy
from asyncrpc.core.links.connection import Connection
from asyncrpc.core.wire.frames import FrameKind, unpack_head
from asyncrpc.errors import EncodeError
from asyncrpc.testing import Cluster, ProcessCluster
from tests.integration.misuse.wrong import World, never_awaited

# Of workers that take only what is allowed: what the traffic and the uses call.
MODULE = "tests.integration.misuse.test_matrix"
ALLOWED = (
    "importlib:import_module",
    "tests.integration.misuse.*:*",
    "builtins:*",
    "torch*:*",
)


class Sent:
    """Counts what workers ask of each other, but for news of members."""

    def __init__(self) -> None:
        self.requests = 0

    def note(self, kind: int, head: bytes) -> None:
        if kind == FrameKind.REQUEST:
            self.requests += 1
        elif kind == FrameKind.SERVICE:
            self.requests += unpack_head(head)[0] != "membership"


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    counting, send = Sent(), Connection.send

    def counted(connection: Connection, kind: int, call_id: int, **about: Any) -> None:
        counting.note(kind, about.get("head", b""))
        send(connection, kind, call_id, **about)

    monkeypatch.setattr(Connection, "send", counted)
    return counting


@pytest.fixture
async def world(sent: Sent) -> AsyncIterator[World]:
    """Two workers in this process, one of another group, and one that has ended."""
    async with Cluster(2) as (a, b), others() as about:
        yield World(a, b, *about)


@pytest.fixture(params=["one process", "two processes"])
async def world_of(
    request: pytest.FixtureRequest, policy: Policy, sent: Sent
) -> AsyncIterator[World]:
    """Workers of a policy, `b` in this process or in one of its own."""
    options = Options(policy=policy, allow=ALLOWED)
    if request.param == "one process":
        async with Cluster(2, options=options) as (a, b), others() as about:
            yield World(a, b, *about)
    else:
        cluster = ProcessCluster(["b"], options=options, method="forkserver")
        async with cluster as a, others() as about:
            # A strict worker imports nothing on a peer's word: its program does.
            with pytest.raises(EncodeError, match="module"):  # the result cannot travel
                await a.peer("b").call(importlib.import_module, MODULE)
            yield World(a, None, *about)


@asynccontextmanager
async def others() -> AsyncIterator[tuple[Any, ...]]:
    """What else a world has: other workers, a loop, a coroutine."""
    loop, unawaited = asyncio.new_event_loop(), never_awaited()
    async with Cluster(1, names=["ended"]) as (ended,):
        pass
    async with Cluster(1, names=["stranger"]) as (stranger,):
        yield stranger, ended, loop, unawaited
    unawaited.close()
    loop.close()
