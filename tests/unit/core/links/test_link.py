"""A link routes each kind of message to the part that takes it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from asyncrpc.core.calls.futures import CallFuture
from asyncrpc.core.calls.machine.calls import LinkState
from asyncrpc.core.links.link import Link
from asyncrpc.core.wire.frames import HEADER, FrameKind, Hello
from asyncrpc.errors import MalformedError, WorkerLostError
from tests.unit.core.calls.fakes import PEER, FakeConnection, FakeHost

# What a connection keeps to itself: its link never sees it.
NOT_FOR_LINKS = {FrameKind.HELLO, FrameKind.DATA, FrameKind.DROP}


class Carrier(FakeConnection):
    """A connection, as far as a link asks of it."""

    def __init__(self) -> None:
        super().__init__()
        self.acknowledged: list[int] = []
        self.peer_closed: str | None = None
        self.peer = Hello(name="b", incarnation=7, rank=-1, pid=1, expects="a")
        self.stream = self.incoming = self
        self.room = asyncio.Event()
        self.room.set()

    def on_taken(self) -> None: ...

    def write_apart(self, message: bytes) -> None:
        fields = HEADER.unpack_from(message)
        self.send(fields[2], fields[8], aux=fields[7])

    def watch_requests(self, begun: Any, unasked: Any) -> None: ...

    def stand_in(self, unreadable: Any) -> None: ...

    def on_ack(self, received: int) -> None:
        self.acknowledged.append(received)

    def on_peer_close(self, why: str) -> None:
        self.peer_closed = why


class Memory:
    """Memory that nobody shares."""

    def __init__(self, host: FakeHost) -> None:
        self.leases = host
        self.regions = self
        self.freed: list[int] = []

    def refer(self, link: Any, encoded: Any) -> None: ...

    def take_back_from(self, link: Any, location: int) -> None:
        self.freed.append(location)


@pytest.fixture
def host() -> FakeHost:
    return FakeHost()


@pytest.fixture
def shared(host: FakeHost) -> Memory:
    return Memory(host)


@pytest.fixture
def link(host: FakeHost, shared: Any) -> Iterator[Link]:
    connection: Any = Carrier()
    yield Link(host, shared, PEER, connection)
    for coroutine in host.tasks:
        coroutine.close()


def take(
    link: Link, kind: int, call_id: int = 0, *, aux: int = 0, control: bytes = b""
) -> None:
    link.on_message(kind, 0, call_id, aux, b"", control, [])


def carrier(link: Link) -> Carrier:
    fake: Any = link.connection
    assert isinstance(fake, Carrier)
    return fake


@pytest.mark.parametrize("kind", FrameKind)
def test_every_kind_of_frame_has_one_handler_or_is_refused(
    link: Link, kind: FrameKind
) -> None:
    parts = link._handlers, link._frame_handlers  # noqa: SLF001
    assert sum(kind in part for part in parts) == (kind not in NOT_FOR_LINKS)
    if kind in NOT_FOR_LINKS:
        with pytest.raises(MalformedError, match=f"a {kind.name} came on an open"):
            take(link, kind)


def test_ping_is_answered(link: Link) -> None:
    take(link, FrameKind.PING, 3, aux=9)
    sent = carrier(link).last
    assert (sent.kind, sent.call_id, sent.aux) == (FrameKind.PONG, 3, 9)
    take(link, FrameKind.PONG, 3, aux=9)
    assert len(carrier(link).sent) == 1
    carrier(link).room.clear()  # the peer reads nothing: answers would pile up
    take(link, FrameKind.PING, 4, aux=9)
    assert len(carrier(link).sent) == 1


def test_goodbye_makes_the_link_drain(link: Link) -> None:
    take(link, FrameKind.GOODBYE)
    assert link.status.state is LinkState.DRAINING
    assert not link.is_lost


def test_ack_of_the_peer_frees_kept_bytes(link: Link) -> None:
    take(link, FrameKind.ACK, aux=77)
    take(link, FrameKind.ACK, 5, aux=78)  # of a lane that has ended
    assert carrier(link).acknowledged == [77]


def test_close_reason_of_the_peer_is_kept(link: Link) -> None:
    take(link, FrameKind.CLOSE, control=b"it restarts")
    assert carrier(link).peer_closed == "it restarts"


def test_shared_blocks_are_returned(link: Link, shared: Memory) -> None:
    take(link, FrameKind.FREE, 4096)
    assert shared.freed == [4096]


@pytest.mark.parametrize("kind", [FrameKind.LANES, FrameKind.LANE_BROKEN])
def test_lane_messages_without_lanes_are_ignored(link: Link, kind: FrameKind) -> None:
    take(link, kind, 1)


def test_dropped_transfer_may_be_a_request_or_an_unwanted_answer(link: Link) -> None:
    call: CallFuture[Any] = CallFuture(loop=link.host.loop, function="max", to="b")
    link.start(call, "builtins:max", ([1, 2], {}))
    link.on_transfer_dropped(FrameKind.REQUEST, 1)
    with pytest.raises(MalformedError, match="begun and given up"):
        link.on_transfer_dropped(FrameKind.RESPONSE, call.call_id)
    link.cancel(call)
    link.on_transfer_dropped(FrameKind.RESPONSE, call.call_id)


def test_ended_connection_ends_the_link(link: Link) -> None:
    call: CallFuture[Any] = CallFuture(loop=link.host.loop, function="max", to="b")
    link.start(call, "builtins:max", ([1, 2], {}))
    link.on_lost("a cable")
    assert isinstance(call.exception(), WorkerLostError)
    assert (link.is_lost, link.lost_because) == (True, "a cable")
    assert len(link.pending) == 0
