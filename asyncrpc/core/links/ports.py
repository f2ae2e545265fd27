"""What the parts of the directory need of connections, links and the group.

`Connection`, `Link` and `MembershipService` implement these; a test uses something
smaller.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, Protocol

from asyncrpc.core.ids import WorkerId
from asyncrpc.core.payloads.ports import ControlConnection, LaneStream
from asyncrpc.core.transport.abc import PeerCredentials, StreamHandler, Transport
from asyncrpc.core.transport.address import Address
from asyncrpc.core.wire.chunks import Arrivals
from asyncrpc.core.wire.handshake import Role
from asyncrpc.core.wire.messages import Hello
from asyncrpc.core.wire.reader import MessageSink
from asyncrpc.errors import AsyncRpcError, TransportError


class HandshakeConnection(StreamHandler, Protocol):
    """A connection from its first byte until both HELLOs are in.

    Attributes:
        peer: the peer's HELLO, once it is in.
        opened: done once the connection is open.
        ended: done when it has ended.
        address: the address that was dialed; None at the end that was dialed.
    """

    role: Role
    peer: Hello | None
    opened: asyncio.Future[Hello]
    ended: asyncio.Future[None]
    address: Address | None

    @property
    def token(self) -> int:
        """Return the number that names it at both ends."""

    @property
    def ticket(self) -> bytes:
        """The ticket of the peer's token; empty if it came without a token."""

    @property
    def scheme(self) -> str:
        """The transport's scheme."""

    @property
    def where(self) -> str:
        """The other end, for people to read."""

    @property
    def has_proved(self) -> bool:
        """Return whether both ends have proved that they know the secret, if any."""

    @property
    def credentials(self) -> PeerCredentials | None:
        """Return the process at the other end, if the kernel vouches for it."""

    def hello(self, hello: Hello) -> None:
        """Send our HELLO."""

    def open_to(self, sink: MessageSink) -> None:
        """Hand all further messages to `sink`."""

    async def until_open(self) -> Hello:
        """Wait until the peer's HELLO has been handled; return it."""

    def fail(self, error: AsyncRpcError) -> None:
        """Abort the connection because of `error`."""

    def end(self, error: AsyncRpcError) -> None:
        """End it at once; its waiters are told before this returns."""

    def close(self, why: str = "") -> None:
        """Write what is queued, then end in order."""


class ResumableConnection(HandshakeConnection, Protocol):
    """A connection that can go on over another transport.

    Attributes:
        mended: set unless it is broken: also when it has ended.
    """

    mended: asyncio.Event

    @property
    def received(self) -> int:
        """How many bytes have been read since the peer's HELLO."""

    @property
    def is_broken(self) -> bool:
        """Return whether it waits for another transport."""

    @property
    def on_broken(self) -> object:
        """Return what is called when its transport breaks, or None."""

    @property
    def ack_through(self) -> ResumableConnection:
        """The connection that a lane belongs to, or the connection itself."""

    def send(
        self, kind: int, call_id: int, *, aux: int = 0, control: bytes = b""
    ) -> None:
        """Write a message."""

    async def settled(self) -> None:
        """Wait until it is not broken: it goes on, or has ended."""

    def break_off(self, reason: str) -> None:
        """Give up the transport, over which nothing arrives any more."""

    def release_transport(self) -> Transport:
        """Give the transport away: this connection only had to bring it."""

    def adopt(self, transport: Transport, received: int) -> None:
        """Go on over another transport."""


class PayloadLanes(Protocol):
    """Carries the large payloads of a connection."""

    @property
    def lanes(self) -> Collection[object]:
        """Return the lanes that are open at both ends."""

    @property
    def accepted(self) -> Collection[object]:
        """Return the lanes that the dialer has not confirmed."""

    def attach(self, connection: Any) -> None:
        """Take a connection as a lane; both HELLOs have arrived."""

    def acknowledge(self) -> None:
        """Tell the peer what has been read."""

    async def close(self) -> None:
        """Send what is queued, then end every lane, in order."""


class RestingPayloads(Protocol):
    """Reads what a connection brings."""

    def rest(self) -> None:
        """Give back memory: nothing comes for now."""


class LinkStream(LaneStream, Protocol):
    """What a connection writes.

    Attributes:
        awaited: calls that have not been answered; not empty: polling goes on.
    """

    awaited: Mapping[int, object]

    def write_apart(self, message: bytes) -> None:
        """Write a message after which the loop does not poll."""


class LinkConnection(ControlConnection, ResumableConnection, Protocol):
    """A connection that calls go over.

    Attributes:
        peer_closed: the reason of the peer for an orderly end, once it has sent it.
    """

    peer_closed: str | None

    @property
    def stream(self) -> LinkStream:
        """What it writes."""

    @property
    def incoming(self) -> RestingPayloads:
        """Reads what it brings."""

    @property
    def lanes(self) -> PayloadLanes | None:
        """Return the carrier of large payloads, once it has been prepared."""

    def acknowledge(self, news_bytes: int = 1) -> None:
        """Say how much has been read, if the peer does not know of so many bytes."""

    def allow_resuming(
        self,
        on_broken: Callable[[LinkConnection, TransportError | None], None],
        next_call_id: Callable[[], int] | None = None,
    ) -> None:
        """Outlive the transport from now on."""

    def prepare_lanes(self, make: Callable[[Arrivals], Any]) -> None:
        """Let large payloads go over lanes, and come over them."""


class Handshakes(Protocol):
    """Makes the connections of one worker, and knows the open ones."""

    is_closing: bool

    @property
    def live(self) -> Collection[LinkConnection]:
        """Return the connections that have a transport and have not ended."""

    def make(
        self,
        role: Role,
        introduce: Callable[[LinkConnection], None],
        on_hello: Callable[[LinkConnection, Hello], None],
        *,
        is_cautious: bool = False,
    ) -> LinkConnection:
        """Make a connection that is ended with the others."""

    def is_trusted(self, connection: HandshakeConnection) -> bool:
        """Check the peer's user, as the kernel states it, where there is no secret."""

    def refuse(self, connection: HandshakeConnection, verdict: str) -> None:
        """Tell the dialer why it is refused, and end."""


class PendingCallIds(Protocol):
    """The calls that wait for an answer."""

    @property
    def next_id(self) -> int:
        """The id of the next call."""

    @property
    def calls(self) -> Mapping[int, object]:
        """Return the waiting calls, by id; always the same object."""


class DirectoryLink(MessageSink, Protocol):
    """A link, as the directory keeps it.

    Attributes:
        is_proven: whether the connection is known to be open at both ends.
    """

    is_proven: bool

    @property
    def peer(self) -> WorkerId:
        """Return the worker at the other end."""

    @property
    def is_lost(self) -> bool:
        """Return whether the connection has ended for good."""

    @property
    def connection(self) -> LinkConnection:
        """Return its connection."""

    @property
    def pending(self) -> PendingCallIds:
        """The calls that wait for an answer."""

    def on_lost(self, reason: str) -> None:
        """The connection has ended: fail what waits."""


class GroupRecords(Protocol):
    """The group's records, as far as the directory needs them."""

    def refusal(self, hello: Hello) -> str:
        """Return why a peer that introduces itself is refused; empty if it is not."""

    @property
    def gateway(self) -> str:
        """The member that this worker joined by as a guest; empty if it is none."""

    def is_claimed(self, hello: Hello) -> bool:
        """Return whether another worker may have the name or rank of a peer."""

    async def claim(self, hello: Hello) -> str:
        """Return why a peer may not have its name and rank; empty if it may."""

    async def settle(self, name: str) -> None:
        """Wait until it is known which life of a worker there is."""

    def introduce_guest(self, hello: Hello) -> Hello:
        """Return the HELLO of a guest with its rank in the group."""

    def take_in(self, connection: HandshakeConnection, hello: Hello) -> None:
        """A worker asks to join."""

    async def refresh(self, name: str) -> bool:
        """Ask others whether a worker is elsewhere now."""

    def on_unused_lost(self, peer: WorkerId) -> None:
        """A connection that the peer had dialed has ended before it was used."""


class PeerObserver(Protocol):
    """Is told which peers are lost, and which are back."""

    def on_peer_lost(self, peer: WorkerId, reason: str) -> None:
        """A peer is gone."""

    def on_peer_back(self, peer: WorkerId) -> None:
        """Take note that a lost peer is back."""


class Silent:
    """The sink of a connection that is being closed."""

    def on_message(self, *_message: Any) -> None:
        """Drop it."""

    def on_transfer_dropped(self, kind: int, call_id: int) -> None:
        """Drop it."""


SILENT: Final = Silent()
# Begins a verdict about joining that no member will change.
JOIN_REFUSED: Final = "refused: "
