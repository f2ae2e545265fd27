"""What the parts here see of their connection and of its link.

Both are made above this package; each has one protocol here, which adds to what calls
see of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from asyncrpc.core.calls.deferred import PendingBuffers
from asyncrpc.core.calls.machine.calls import PendingCalls
from asyncrpc.core.calls.ports import CallConnection, CallLink
from asyncrpc.core.payloads.pump import ChunkPump
from asyncrpc.core.serde import Encoded
from asyncrpc.core.transport.abc import PeerCredentials
from asyncrpc.core.transport.byte_stream import ByteStream
from asyncrpc.core.transport.flow import WaterMarks
from asyncrpc.core.wire.frames import Hello, Places
from asyncrpc.core.wire.outgoing import OutgoingMessage
from asyncrpc.errors import AsyncRpcError

# Takes memory, and what to call once it is worth asking again; returns whether the
# memory may be written to now.
MemoryIsReady: TypeAlias = Callable[[memoryview, Callable[[], None]], bool]


class PayloadRoute(Protocol):
    """A way for large payloads that cannot take all of them: `SlabMover`, `Lanes`."""

    def send(self, message: OutgoingMessage) -> bool:
        """Take a message and its payload, or refuse."""

    def clear(self) -> None:
        """Forget all unsent messages, as the connection has ended."""


class PayloadConnection(CallConnection, Protocol):
    """A connection whose payloads are moved, or that is a lane: `links.connection`.

    Attributes:
        on_broken: called when its transport has broken; None: the connection ends with
            its transport.
        on_lost: called when the connection has ended.
    """

    on_broken: Callable[..., None] | None
    on_lost: Callable[[Any, AsyncRpcError | None], None] | None

    @property
    def peer(self) -> Hello | None:
        """The peer's HELLO, once it is in."""

    @property
    def peer_closed(self) -> str | None:
        """The reason of the peer's CLOSE; None before it has come."""

    @property
    def credentials(self) -> PeerCredentials | None:
        """The process at the other end, if the kernel vouches for it."""

    @property
    def scheme(self) -> str:
        """The transport's scheme."""

    @property
    def where(self) -> str:
        """The other end, for people to read."""

    @property
    def token(self) -> int:
        """The token of the connection, equal at both ends."""

    @property
    def reads(self) -> int:
        """Number of reads so far."""

    @property
    def stream(self) -> ByteStream:
        """What it writes."""

    @property
    def pump(self) -> ChunkPump:
        """Gives chunks of payloads to lanes."""

    @property
    def is_broken(self) -> bool:
        """Whether the connection waits for another transport."""

    @property
    def ended(self) -> asyncio.Future[None]:
        """Done when the connection has ended."""

    def count_kept(self) -> int:
        """Return how many bytes the peer has not acknowledged."""

    def acknowledge(self) -> None:
        """Send an ACK, if bytes have been read since the last one."""

    def post(self, parts: Sequence[bytes | memoryview]) -> None:
        """Write the parts of a message."""

    def share_memory(self, mover: PayloadRoute, places: Places) -> None:
        """Let large payloads go through memory that both ends have."""

    def open_as_lane(
        self,
        reader: Any,
        control: Any,
        *,
        on_writable: Callable[[], None],
        marks: WaterMarks,
    ) -> None:
        """Give all further bytes to a lane of `control`."""

    def allow_resuming(self, on_broken: Callable[..., None]) -> None:
        """Outlive the transport from now on."""

    def on_ack(self, received: int) -> None:
        """Handle an ACK of the peer."""

    def on_peer_close(self, why: str) -> None:
        """Handle a CLOSE of the peer."""

    def close(self) -> None:
        """Write all queued bytes, then end in order."""


class PayloadLink(CallLink, Protocol):
    """The link of a connection whose payloads are moved: `links.link`."""

    @property
    def connection(self) -> PayloadConnection:
        """The connection that carries the messages."""

    @property
    def pending(self) -> PendingCalls[Any]:
        """This worker's calls that have not been answered."""

    def defer(self, encoded: Encoded) -> PendingBuffers:
        """Make a message wait for one more thing."""
