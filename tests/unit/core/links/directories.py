"""Directories without workers: what their parts do, on a simulated network.

A `Host` has a directory and nothing above it; its links keep what arrives.  Time is
virtual (`run`), so an hour of it takes a moment, and what never ends is named.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, TypeVar

from asyncrpc.core.counters import Counters
from asyncrpc.core.ids import Incarnation, WorkerId
from asyncrpc.core.links.connection import Connection
from asyncrpc.core.links.connections import Connections, ConnectionSettings
from asyncrpc.core.links.directory import Directory, DirectorySettings
from asyncrpc.core.links.entry import PeerEntry
from asyncrpc.core.links.tokens import Tokens
from asyncrpc.core.members import Member
from asyncrpc.core.payloads.receive_pool import fresh
from asyncrpc.core.transport.abc import Listener
from asyncrpc.core.transport.address import Address
from asyncrpc.core.wire.frames import FrameKind, Hello
from asyncrpc.core.wire.limits import MessageLimits
from asyncrpc.errors import ConnectionLostError
from asyncrpc.testing.loop import SimLoop
from asyncrpc.testing.network import Network
from asyncrpc.trace import FlightRecorder

T = TypeVar("T")

TIMES = DirectorySettings(
    connect_timeout_s=2.0,
    handshake_timeout_s=5.0,
    handshakes_max=256,
    heartbeat_s=1.0,
    lost_after_s=4.0,
    bulk_lanes=0,
    memory_is_ready=None,
    secret=None,
    tokens=Tokens(os.urandom),
)


def run(main: Coroutine[object, object, T]) -> T:
    """Run a coroutine in virtual time."""
    with asyncio.Runner(loop_factory=SimLoop) as runner:
        return runner.run(main)


def now_s() -> float:
    return asyncio.get_running_loop().time()


class PlainLink:
    """A link that keeps the numbers of the calls that arrive.

    Attributes:
        arrived: those numbers, in order.
        lost_because: why it is lost; empty if it is not.
    """

    def __init__(self, peer: WorkerId, connection: Connection) -> None:
        self.peer = peer
        self.connection = connection
        self.pending = SimpleNamespace(next_id=1, calls={})
        self.is_proven = True
        self.arrived: list[int] = []
        self.lost_because = ""

    @property
    def is_lost(self) -> bool:
        return bool(self.lost_because)

    def send(self, number: int) -> None:
        self.connection.send(FrameKind.CANCEL, number)

    def on_message(
        self,
        kind: int,
        _flags: int,
        call_id: int,
        aux: int,
        _head: bytes,
        control: bytes,
        _buffers: list[memoryview],
    ) -> None:
        if kind in {FrameKind.CANCEL, FrameKind.REQUEST}:
            self.arrived.append(call_id)
        elif kind == FrameKind.PING:
            self.connection.send(FrameKind.PONG, call_id)
        elif kind == FrameKind.CLOSE:
            self._on_close(call_id, bytes(control).decode())
        elif kind == FrameKind.LANES and self.connection.lanes is not None:
            self.connection.lanes.on_asked(aux)
        elif kind == FrameKind.ACK and call_id and self.connection.lanes is not None:
            self.connection.lanes.on_ack(call_id, aux)
        elif kind == FrameKind.LANE_BROKEN and self.connection.lanes is not None:
            self.connection.lanes.on_peer_broken(call_id, aux)

    def _on_close(self, lane: int, why: str) -> None:
        lanes, closed = self.connection.lanes, self.connection
        connection = closed if not lane or lanes is None else lanes.connection_of(lane)
        if connection is not None:
            connection.on_peer_close(why)

    def on_transfer_dropped(self, kind: int, call_id: int) -> None:
        raise AssertionError("nobody gives anything up here")

    def on_lost(self, reason: str) -> None:
        self.lost_because = reason


class Host:
    """One directory, and all that it needs of a worker.

    Attributes:
        directory: that one.
        lost: peers that it has lost.
        moved_to: where the group says that a peer is now, by its name.
    """

    def __init__(
        self,
        network: Network,
        name: str,
        incarnation: int,
        times: DirectorySettings = TIMES,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.name = name
        self.rank, self.world_size = -1, 0
        self.incarnation = Incarnation(incarnation)
        self.counters = Counters()
        self.lost: list[str] = []
        self.back: list[str] = []
        self.moved_to: dict[str, Member] = {}
        self.unused_lost: list[str] = []
        self.refuses: dict[str, str] = {}
        self._connector = network.connector(name)
        self._listener: Listener | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        settings = ConnectionSettings(
            None, MessageLimits(), fresh, network.rng.randbytes
        )
        this: Any = self  # what parts of a worker that has no other would ask
        make_link: Any = PlainLink
        # Any: its links are of this class, not those of a worker.
        self.directory: Any = Directory(
            this,
            self,
            self.counters,
            FlightRecorder(),
            times,
            connections=Connections(this, self.loop, settings),
            connectors={"mem": self._connector},
            make_link=make_link,
            services=this,
            sidecar=this,
        )
        self.directory.begin(self)
        self.directory.serve()

    # --- what the parts of a directory ask ------------------------------------------

    @property
    def id(self) -> WorkerId:
        return WorkerId(self.name, self.incarnation)

    @property
    def member(self) -> Member:
        return Member(self.name, -1, self.incarnation, (f"mem://{self.name}",))

    def hello(self, **fields: Any) -> Hello:
        addresses = (f"mem://{self.name}",)
        return Hello(self.name, self.incarnation, -1, 1, addresses=addresses, **fields)

    def start_task(
        self,
        coroutine: Coroutine[Any, Any, T],
        *,
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[T]:
        task = self.loop.create_task(coroutine, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def on_peer_lost(self, peer: WorkerId, _reason: str) -> None:
        self.lost.append(peer.name)

    def on_peer_back(self, peer: WorkerId) -> None:
        self.back.append(peer.name)

    def on_peer(self, hello: Hello) -> None:
        """There is no sidecar that would have to know."""

    def refusal(self, hello: Hello) -> str:
        return self.refuses.get(hello.name, "")

    gateway = ""

    def is_claimed(self, _hello: Hello) -> bool:
        return False

    async def claim(self, _hello: Hello) -> str:
        return ""

    async def settle(self, name: str) -> None:
        return

    def introduce_guest(self, hello: Hello) -> Hello:
        return hello

    def take_in(self, connection: Connection, _hello: Hello) -> None:
        self.directory.connections.refuse(connection, "nobody joins here")

    async def refresh(self, name: str) -> bool:
        member = self.moved_to.pop(name, None)
        if member is not None:
            self.directory.add([member])
        return member is not None

    def on_unused_lost(self, peer: WorkerId) -> None:
        self.unused_lost.append(peer.name)

    # --- what tests do --------------------------------------------------------------

    async def listen(self) -> None:
        address = Address("mem", self.name)
        self._listener = await self._connector.listen(address, self.directory.accept)

    async def listen_no_more(self) -> None:
        if self._listener is not None:
            await self._listener.close()
            self._listener = None

    def entry(self, name: str) -> PeerEntry:
        entry: PeerEntry = self.directory.find(name)
        return entry

    def link_to(self, name: str) -> PlainLink:
        link: PlainLink | None = self.directory.link_to(name)
        assert link is not None
        return link

    def arrived(self, name: str) -> list[int]:
        """Return what has come over the link to a peer."""
        link: PlainLink | None = self.directory.link_to(name)
        return [] if link is None else link.arrived

    async def close(self) -> None:
        await self.listen_no_more()
        await self.directory.close(1.0)
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def hosts(network: Network, *names: str, **options: Any) -> list[Host]:
    """Return hosts that listen and know each other; the first has the least number."""
    started = [Host(network, name, 10 + at, **options) for at, name in enumerate(names)]
    for host in started:
        await host.listen()
        host.directory.add([host.member for host in started])
    return started


async def closed(*hosts_to_close: Host) -> None:
    """Close hosts, all at once."""
    await asyncio.gather(*(host.close() for host in hosts_to_close))


async def until(is_so: Callable[[], bool], limit_s: float = 60.0) -> None:
    """Let virtual time pass until something is so."""
    async with asyncio.timeout(limit_s):
        while not is_so():  # noqa: ASYNC110  (there is no event)
            await asyncio.sleep(0.001)


@contextmanager
def cut_at_once(host: Host, times: int) -> Iterator[list[int]]:
    """Break so many of a host's connections as soon as they are made."""
    cuts: list[int] = []
    inner: Any = host.directory.connections
    make = inner.make

    def make_broken(*args: Any) -> Connection:
        connection: Connection = make(*args)
        if len(cuts) < times:
            cuts.append(len(cuts))
            on_made = connection.on_made

            def fail(broken: Connection) -> None:
                if on_made is not None:
                    on_made(broken)
                broken.fail(ConnectionLostError("cut in its handshake"))

            connection.on_made = fail
        return connection

    inner.make = make_broken
    try:
        yield cuts
    finally:
        inner.make = make
