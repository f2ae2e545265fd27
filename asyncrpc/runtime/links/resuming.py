"""What a connection does to outlive its transport.

`Connection` is this and the rest: kept apart, so that either can be read alone.  Who
dials again, and for how long, is in `reconnector`; what is counted and kept, in
`wire.resume`.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from asyncrpc.errors import AsyncRpcError, ConnectionLostError, TransportError
from asyncrpc.runtime.payloads.lane_user import LaneUser
from asyncrpc.transport.abc import Buffer, PeerCredentials, StreamHandler, Transport
from asyncrpc.wire.frames import FrameKind, prefix
from asyncrpc.wire.resume import ACK_BYTES, LANE_ACK_BYTES, Kept

if TYPE_CHECKING:
    from asyncrpc.runtime.links.connection import Connection
    from asyncrpc.transport.flow import WaterMarks
    from asyncrpc.wire.messages import Hello

NEVER: Final = 1 << 64  # no call and no byte has this number

# What may be written to a connection that is broken: messages, for payloads wait.
LIMBO_BYTES_MAX: Final = 64 << 20


def keep_nothing(parts: Sequence[bytes | memoryview]) -> None:
    """Keep nothing: the connection does not outlive its transport."""


class Discard:
    """The handler of a transport that has been replaced: whatever comes is dropped."""

    def __init__(self) -> None:
        self._scratch = memoryview(bytearray(1 << 10))

    def connection_made(self, transport: Transport) -> None:
        """It was made long ago."""

    def get_buffer(self, _sizehint: int = -1, /) -> memoryview:
        """Return where bytes are thrown away."""
        return self._scratch

    def buffer_updated(self, nbytes: int, /) -> None:
        """Throw them away."""

    def connection_lost(self, error: TransportError | None, /) -> None:
        """Nobody waits for its end."""

    def pause_writing(self) -> None:
        """Nothing is written."""

    def resume_writing(self) -> None:
        """Nothing is written."""


class Limbo(Transport):
    """Stands where the transport of a connection was until another takes its place.

    What is sent to it is kept by the connection, as everything is.
    """

    def __init__(self, connection: Connection, was: Transport) -> None:
        self._handler: StreamHandler = connection
        self._connection = connection
        self._remote = was.remote
        self._scheme = was.scheme
        self._credentials = was.credentials
        self._loop = asyncio.get_running_loop()
        self._bytes = 0
        self._ended = False

    @property
    def remote(self) -> str:
        """Where the other end was."""
        return self._remote

    @property
    def scheme(self) -> str:
        """As of the transport that has broken."""
        return self._scheme

    @property
    def credentials(self) -> PeerCredentials | None:
        """As of the transport that has broken."""
        return self._credentials

    def send(self, buffers: Sequence[Buffer]) -> None:
        """Count what will have to be sent; too much ends the connection."""
        self._bytes += sum(map(len, buffers))
        if self._bytes > LIMBO_BYTES_MAX and not self._ended:
            self._connection.fail(
                ConnectionLostError(
                    f"more than {LIMBO_BYTES_MAX} bytes of messages wait for a "
                    f"connection to {self._remote}"
                )
            )

    @property
    def queued_bytes(self) -> int:
        """Nothing is queued here."""
        return 0

    def pause_reading(self) -> None:
        """Nothing is read."""

    def resume_reading(self) -> None:
        """Nothing is read."""

    def use_marks(self, marks: WaterMarks) -> None:
        """Nothing is queued."""

    def set_handler(self, handler: StreamHandler) -> None:
        """Tell another handler of the end."""
        self._handler = handler

    def close(self) -> None:
        """End; the connection is told."""
        if not self._ended:
            self._ended = True
            self._loop.call_soon(self._lost)

    def _lost(self) -> None:
        self._handler.connection_lost(None)

    def abort(self) -> None:
        """End; the connection is told."""
        self.close()


class Resuming(LaneUser):
    """The part of a `Connection` that outlives a transport.

    Attributes:
        kept: what was sent and not acknowledged.
        received: how many bytes have been read since the peer's HELLO.
        on_broken: called when the transport has broken; None: its end is the
            connection's.
        peer_closed: why the peer ends in order, once it has said so.
        ack_through: the connection that carries our ACKs: itself, or for a lane the
            connection that it belongs to.
        first_kept_back: while it is broken, the first call that cannot have left; else
            `NEVER`.
        mended: set unless it is broken: also when it has ended.
        next_call_id: tells the number that the next call would have.
    """

    peer: Hello | None
    opened: asyncio.Future[Hello]
    kept: Kept
    received: int
    mended: asyncio.Event
    on_broken: Callable[[Connection, TransportError | None], None] | None
    peer_closed: str | None
    ack_through: Connection
    first_kept_back: int
    next_call_id: Callable[[], int] | None
    _ack_at: int
    _acked: int
    _ack_bytes: int
    _is_reading_paused: bool
    _marks: WaterMarks | None
    _cause: AsyncRpcError | None
    _closing: bool

    @abstractmethod
    def fail(self, error: AsyncRpcError) -> None:
        """Abort the connection because of `error`."""

    @abstractmethod
    def join(self, part: bytes) -> None:
        """Write a message that can wait."""

    @abstractmethod
    def _whole(self) -> Connection:
        """Return the connection that this is a part of."""

    @abstractmethod
    def _finish(self, error: TransportError | None) -> None:
        """The connection has ended for good."""

    def _prepare_resuming(self) -> None:
        """Begin as a connection that ends with its transport."""
        self.kept = Kept()
        self._keep = keep_nothing
        self.received = 0
        self._acked = 0
        self._ack_at = NEVER
        self._ack_bytes = 0
        self.on_broken = None
        self.peer_closed = None
        self.ack_through = self._whole()
        self.first_kept_back = NEVER
        self.next_call_id = None
        self.mended = asyncio.Event()
        self.mended.set()
        self._closing = False
        self._is_reading_paused = False
        self._marks = None

    @property
    def is_broken(self) -> bool:
        """Whether it waits for another transport."""
        return isinstance(self._transport, Limbo)

    async def settled(self) -> None:
        """Wait until the connection is not broken: it goes on, or has ended.

        Cancellation:
            Nothing has changed.
        """
        await self.mended.wait()

    def acknowledge(self, news_bytes: int = 1) -> None:
        """Say how much has been read, if the peer does not know of so many bytes."""
        received = self.received
        if received - self._acked < news_bytes or self.on_broken is None:
            return
        self._acked = received
        self._ack_at = received + self._ack_bytes
        control = self.ack_through
        lane = 0 if control is self else self.token
        control.join(prefix(FrameKind.ACK, lane, aux=received))

    def allow_resuming(
        self, on_broken: Callable[[Connection, TransportError | None], None]
    ) -> None:
        """Outlive the transport from now on; the first byte counted is the next one."""
        self.on_broken = on_broken
        is_lane = self.ack_through is not self
        self._ack_bytes = LANE_ACK_BYTES if is_lane else ACK_BYTES
        self._ack_at = self.received + self._ack_bytes
        self._keep = self.kept.add

    def break_off(self, reason: str) -> None:
        """Give up the transport, which brings nothing any more, but not the connection.

        The peer may have no sign of it: whoever dialed dials again.
        """
        transport = self._transport
        if transport is None or self.is_broken or self.on_broken is None:
            return
        self._break(ConnectionLostError(f"{self.where}: {reason}"))
        transport.set_handler(Discard())
        transport.abort()

    def _may_resume(self) -> bool:
        return (
            self.on_broken is not None
            and self._cause is None
            and self.peer_closed is None
            and not self._closing
            and not self.is_broken
        )

    def _break(self, error: TransportError | None) -> None:
        """Wait for another transport."""
        transport = self._transport
        if transport is None or self.on_broken is None:
            return
        self._transport = Limbo(self._whole(), transport)
        self._writable.clear()
        self.mended.clear()
        if self.next_call_id is not None:
            self.first_kept_back = self.next_call_id()
        self.on_broken(self._whole(), error)

    def release_transport(self) -> Transport:
        """Give the transport away: this connection was only to bring it."""
        transport, self._transport = self._transport, None
        if transport is None or self.peer is None:
            raise ConnectionLostError("the connection ended before it could resume")
        if not self.opened.done():
            self.opened.set_result(self.peer)
        transport.set_handler(Discard())  # until `adopt`
        self._finish(None)
        return transport

    def adopt(self, transport: Transport, received: int) -> None:
        """Go on over another transport; only while it is broken.

        Args:
            transport: connected, and both HELLOs are in.
            received: how many bytes of ours the peer has read.

        Raises:
            MalformedError: the peer cannot have read so many.
        """
        rest = self.kept.rest(received)
        self._transport = transport
        self.first_kept_back = NEVER
        transport.set_handler(self._whole())
        self._writable.set()
        if self._marks is not None:
            transport.use_marks(self._marks)
        if self._is_reading_paused:
            transport.pause_reading()
        if rest:
            transport.send(rest)
        self._acked = self.received  # it has just been said
        self._ack_at = self.received + self._ack_bytes
        if self.is_writable:
            self._on_writable()

    def end(self, error: AsyncRpcError) -> None:
        """End the connection at once; whoever waits is told before this returns."""
        if self._cause is None:
            self._cause = error
        transport, self._transport = self._transport, None
        if transport is None:
            return
        transport.set_handler(Discard())
        transport.abort()
        self._finish(None)
