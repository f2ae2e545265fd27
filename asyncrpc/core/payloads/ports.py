"""What lanes need: of the control connection, of their own connections, of memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

from asyncrpc.core.payloads.pump import ChunkPump
from asyncrpc.core.transport.flow import WaterMarks
from asyncrpc.core.wire.outgoing import OutgoingMessages
from asyncrpc.errors import AsyncRpcError

# Takes memory, and what to call once it is worth asking again; returns whether the
# memory may be written to now.
MemoryIsReady: TypeAlias = Callable[[memoryview, Callable[[], None]], bool]


class LaneStream(Protocol):
    """The bytes that a connection writes."""

    @property
    def room(self) -> asyncio.Event:
        """Set while the transport has room."""

    def write_now(self, *parts: bytes | memoryview) -> None:
        """Write parts of frames now."""

    def pause_reading(self) -> None:
        """Stop reading for now."""

    def resume_reading(self) -> None:
        """Go on reading."""


class ControlConnection(Protocol):
    """The connection that lanes belong to.

    Attributes:
        on_broken: called when its transport has broken; None: the connection ends with
            its transport.
    """

    on_broken: Callable[..., None] | None

    @property
    def reads(self) -> int:
        """Number of reads so far."""

    @property
    def scheme(self) -> str:
        """The transport's scheme."""

    @property
    def where(self) -> str:
        """The other end, for people to read."""

    @property
    def stream(self) -> LaneStream:
        """What it writes."""

    @property
    def pump(self) -> ChunkPump:
        """Gives chunks of payloads to lanes."""

    @property
    def outgoing(self) -> OutgoingMessages:
        """Messages that are not written yet."""

    def send(
        self, kind: int, call_id: int, *, aux: int = 0, control: bytes = b""
    ) -> None:
        """Write a message."""

    def fail(self, error: AsyncRpcError) -> None:
        """Abort the connection, and with it the link."""


class LaneConnection(Protocol):
    """A connection that becomes a lane.

    Attributes:
        on_lost: called when the connection has ended.
    """

    on_lost: Callable[[Any, AsyncRpcError | None], None] | None

    @property
    def ended(self) -> asyncio.Future[None]:
        """Done when the connection has ended."""

    def count_kept(self) -> int:
        """Return how many bytes the peer has not acknowledged."""

    @property
    def is_broken(self) -> bool:
        """Whether the connection waits for another transport."""

    @property
    def peer_closed(self) -> str | None:
        """The reason of the peer's CLOSE; None before it has come."""

    @property
    def where(self) -> str:
        """The other end, for people to read."""

    @property
    def token(self) -> int:
        """The token of the connection, equal at both ends."""

    @property
    def stream(self) -> LaneStream:
        """What it writes."""

    @property
    def acknowledge(self) -> Callable[[], None]:
        """Send an ACK, if bytes have been read since the last one."""

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

    def fail(self, error: AsyncRpcError) -> None:
        """Abort the connection."""
