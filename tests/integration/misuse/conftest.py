"""The workers that are used wrongly, and a count of what they send."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from asyncrpc.runtime.links.connection import Connection
from asyncrpc.testing import Cluster
from asyncrpc.wire.frames import FrameKind
from asyncrpc.wire.messages import unpack_head
from tests.integration.misuse.wrong import World, never_awaited


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
    other_loop = asyncio.new_event_loop()
    async with Cluster(1, names=["ended"]) as (ended,):
        pass
    async with Cluster(2) as (a, b), Cluster(1, names=["stranger"]) as (stranger,):
        unawaited = never_awaited()
        yield World(a, b, stranger, ended, other_loop, unawaited)
        unawaited.close()
    other_loop.close()
