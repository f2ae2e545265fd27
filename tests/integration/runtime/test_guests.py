"""Guests, which came from outside with a token, over loopback."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import pytest

from asyncrpc import (
    LivenessOptions,
    LocalRendezvous,
    NetworkOptions,
    Options,
    Worker,
)
from asyncrpc.wire.frames import FrameKind
from tests.integration.runtime.groups import LIMIT_S, started
from tests.integration.runtime.test_membership import next_of

OPTIONS = Options(
    drain_timeout_s=1.0,
    rendezvous_timeout_s=30.0,
    liveness=LivenessOptions(heartbeat_s=1.0, lost_after_s=4.0),
)
INSIDE = Options(
    secret="a secret of those inside",
    drain_timeout_s=1.0,
    network=NetworkOptions(listen=("tcp://127.0.0.1:0",)),
    liveness=OPTIONS.liveness,
)


@pytest.fixture
async def inside() -> AsyncIterator[tuple[Worker, Worker]]:
    meeting = LocalRendezvous(2)
    gateway, other = (
        Worker(name, rank=rank, rendezvous=meeting, options=INSIDE)
        for rank, name in enumerate(("gateway", "other"))
    )
    async with started(gateway, other):
        yield gateway, other


def door_of(gateway: Worker) -> str:
    return gateway.addresses[0].replace("tcp://", "join://")


class _Elsewhere:
    """A guest in a thread and on a loop of its own, as a process has them."""

    def __init__(self, door: str, token: str, names: list[str]) -> None:
        self._door, self._token, self._names = door, token, names
        self._leave = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.is_there, self.has_left = threading.Event(), threading.Event()

    def run(self) -> None:
        try:
            asyncio.run(self._live())
        finally:
            self.is_there.set()
            self.has_left.set()

    async def _live(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with Worker(
            "laptop",
            rendezvous=self._door,
            options=Options(token=self._token, liveness=OPTIONS.liveness),
        ) as laptop:
            for name in self._names:
                assert await laptop.peer(name).call(len, "abc") == 3
            self.is_there.set()
            await self._leave.wait()
            await laptop.shutdown(drain_timeout_s=0.0)

    def leave(self) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._leave.set)


@contextmanager
def elsewhere(door: str, token: str, *names: str) -> Iterator[_Elsewhere]:
    """Run a guest that has called some members; it leaves with the block."""
    guest = _Elsewhere(door, token, list(names))
    thread = threading.Thread(target=guest.run)
    thread.start()
    try:
        yield guest
    finally:
        if not guest.has_left.is_set():
            guest.leave()
        thread.join(LIMIT_S)


async def test_who_leaves_while_its_gateway_is_held_up_has_left(
    inside: tuple[Worker, Worker],
) -> None:
    """The gateway writes to it before it has read the farewell."""
    gateway, _other = inside
    token = gateway.tokens.issue(valid_s=600.0, name="laptop")
    changes = gateway.members_changed()
    with elsewhere(door_of(gateway), token, "gateway") as laptop:
        assert await next_of(changes) == ("joined", "laptop")
        await asyncio.to_thread(laptop.is_there.wait, LIMIT_S)
        link = gateway.parts.directory.link_to("laptop")
        assert link is not None
        # In one turn of the gateway's loop.
        laptop.leave()
        laptop.has_left.wait(LIMIT_S)
        link.connection.send(FrameKind.PING, 0)
        link.connection.stream.flush()
        assert await next_of(changes) == ("left", "laptop")
