"""Drives one connection: the handshake, then frames in and out of a transport.

The connection knows who the peer is and how to write messages to it; what they mean is
the `Link`'s business, which becomes the reader's sink once both HELLOs are in.

Its parts: what it writes (`byte_stream`), what outlives its transport (`resumption`),
and by which way large payloads leave (`payloads.routes`).  What it reads goes to one
reader after another: of the handshake, of frames, or of a lane.

After any error in the stream its position is unknown: the connection is aborted.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Protocol, TypeAlias

from asyncrpc.core.calls.deferred import PendingBuffers
from asyncrpc.core.calls.reading_turns import ReadingTurns, logged
from asyncrpc.core.links.disconnected import Discard
from asyncrpc.core.links.resumption import Resumption
from asyncrpc.core.links.sinks import HelloSink
from asyncrpc.core.loop.spin import Spinner
from asyncrpc.core.payloads.lanes import Lanes, PayloadRoutes
from asyncrpc.core.payloads.ports import PayloadRoute
from asyncrpc.core.payloads.pump import ChunkPump
from asyncrpc.core.payloads.receive_pool import IncomingPayloads, fresh
from asyncrpc.core.transport.abc import PeerCredentials, Transport
from asyncrpc.core.transport.address import Address
from asyncrpc.core.transport.byte_stream import ByteStream
from asyncrpc.core.transport.flow import WaterMarks
from asyncrpc.core.wire.chunks import Arrivals
from asyncrpc.core.wire.frames import (
    HEADER,
    INLINE_BYTES_MAX,
    MAGIC,
    VERSION,
    FrameKind,
    Hello,
    Places,
    prefix,
)
from asyncrpc.core.wire.handshake import (
    Handshake,
    HandshakeReader,
    HandshakeState,
    Role,
)
from asyncrpc.core.wire.limits import MessageLimits
from asyncrpc.core.wire.outgoing import OutgoingMessage, OutgoingMessages
from asyncrpc.core.wire.reader import MessageSink
from asyncrpc.core.wire.resume import (
    ACK_BYTES,
    LANE_ACK_BYTES,
    ResumeEvent,
    ResumeState,
)
from asyncrpc.errors import (
    AsyncRpcError,
    AuthenticationError,
    ConnectError,
    ConnectionLostError,
    RemoteProtocolError,
    TransportError,
)

logger = logging.getLogger("asyncrpc")

OnBroken: TypeAlias = Callable[["Connection", TransportError | None], None]

# Up to here a message is written as one piece: a copy costs less than a second buffer.
JOINED_BYTES_MAX: Final = 8 << 10


class ConnectionState(enum.Enum):
    """How far a connection has come."""

    HANDSHAKE = "proofs are exchanged"
    HELLO = "waits for the peer's name"
    OPEN = "open"
    CLOSED = "closed"


class ByteReader(Protocol):
    """Takes the bytes of a connection: of the handshake, of frames, or of a lane."""

    @property
    def bytes_copied(self) -> int:
        """Bytes of buffers copied in user space."""

    @property
    def message_bytes_copied(self) -> int:
        """Return how many of them belong to the current message."""

    def get_buffer(self) -> memoryview:
        """Return where the next bytes must land."""

    def advance(self, nbytes: int) -> None:
        """Take the bytes that have arrived."""


class Connection:
    """One connection to one peer, from the first byte on.

    Attributes:
        role: which end this is; a guest that dials for another guest becomes the
            acceptor.
        state: how far it has come.
        peer: the peer's HELLO, once it is in.
        reads: how often something has been read.
        address: the address that was dialed; None at the end that was dialed.
        bytes_gathered: bytes of buffers that were copied together to be sent.
        opened, ended: done once the peer's HELLO is in, and when it has ended.
        on_made, on_lost: called when there is a transport, and when it has ended.
        on_broken: called when the transport has broken; None: its end is the
            connection's.
        peer_closed: the reason of the peer for an orderly end, once it has sent it.
        ack_through: the connection that carries our ACKs: itself, or for a lane the
            connection that it belongs to.
        stream, outgoing: what it writes, and messages that are not written yet.
        pump: gives chunks of payloads to this connection, or its lanes.
        payloads: the ways by which large payloads leave.
        incoming, turns: payloads that arrive; when messages are parsed.
        join, drop, submit: see `ByteStream`, `OutgoingMessages` and `PayloadRoutes`.
        resumption: replaces its transport.
        claim, release_claim, forget_transfer: see `incoming`.
        acknowledge, count_kept: see `resumption`.
    """

    def __init__(
        self,
        handshake: Handshake,
        *,
        loop: asyncio.AbstractEventLoop,
        limits: MessageLimits,
        make_buffer: Callable[[int], memoryview] = fresh,
        poller: Spinner | None = None,
        introduce: Callable[[Connection], None],
        on_hello: Callable[[Connection, Hello], None],
    ) -> None:
        self.role = handshake.role
        self.state = ConnectionState.HANDSHAKE
        self.peer: Hello | None = None
        self.reads = 0
        self.address: Address | None = None
        self.bytes_gathered = 0
        self.opened: asyncio.Future[Hello] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.on_made: Callable[[Connection], None] | None = None
        self.on_lost: Callable[[Connection, AsyncRpcError | None], None] | None = None
        self.on_broken: OnBroken | None = None
        self.peer_closed: str | None = None
        self.ack_through = self
        self.stream = ByteStream(loop, poller)
        self.join = self.stream.join
        self.hold = self.stream.hold
        self._write = self.stream.write
        self.outgoing = OutgoingMessages(self.stream.on_less)
        self.drop = self.outgoing.drop
        self.pump = ChunkPump(self.stream, self.outgoing, loop=loop, post=self.post)
        self.payloads = PayloadRoutes(self.pump, self.outgoing, self.send)
        self.submit = self.payloads.submit
        self.resumption = Resumption(self)
        # Below this package nobody knows its parts; so these are methods of its own.
        self.acknowledge = self.resumption.acknowledge
        self.count_kept = self.resumption.count_kept
        self._receipts = self.resumption.receipts
        self._poller = poller
        self._introduce = introduce
        self._on_hello = on_hello
        self._on_writable = self.pump.pump
        self._cause: AsyncRpcError | None = None
        sink = HelloSink(self._take_hello)
        self.incoming = IncomingPayloads(sink, limits, make_buffer)
        self.claim = self.incoming.claim
        self.release_claim = self.incoming.release_claim
        self.forget_transfer = self.incoming.forget
        self._frames = self.incoming.frames
        self.turns = ReadingTurns(self._frames, self.stream, loop, self._on_unreadable)
        self._handshake = handshake
        self._reader: ByteReader = HandshakeReader(handshake, self._on_record)

    # --- the transport's side (StreamHandler) ----------------------------------------

    def connection_made(self, transport: Transport) -> None:
        """Begin the handshake."""
        self.stream.transport = transport
        self._handshake.binding = transport.channel_binding
        if self.on_made is not None:
            self.on_made(self)
        if self._cause is not None:  # it was given up before it was made
            transport.abort()
        elif opening := self._handshake.start():
            self.stream.write_uncounted(opening)

    def get_buffer(self, _sizehint: int = -1, /) -> memoryview:
        """Return where the next bytes must land."""
        return self._reader.get_buffer()

    def buffer_updated(self, nbytes: int, /) -> None:
        """Take what has landed; any error in it ends the connection."""
        receipts, poller = self._receipts, self._poller
        self.reads += 1
        receipts.received += nbytes
        if poller is not None:
            poller.read()
        try:
            if receipts.received >= receipts.due_at:
                self.resumption.on_due()  # before what may be answered at once
            self._reader.advance(nbytes)
        except Exception as error:  # noqa: BLE001
            self._on_unreadable(error)
        if poller is not None and self.stream.awaited:
            poller.wait(is_for_answer=True)

    def _on_unreadable(self, error: Exception) -> None:
        """End the connection because of what has come over it."""
        if self.state is ConnectionState.HANDSHAKE and isinstance(
            error, (AuthenticationError, RemoteProtocolError)
        ):
            self._refuse(error)
        else:
            self._fail_aloud(logged(error, self.where))

    def connection_lost(self, error: TransportError | None, /) -> None:
        """Wait for another transport, or end the connection."""
        if not self.resumption.lose(error):
            self._finish(error)

    def pause_writing(self) -> None:
        """Hold back payloads; messages still go."""
        self.stream.on_full()

    def resume_writing(self) -> None:
        """Go on with the payloads."""
        self.stream.room.set()
        self._on_writable()
        self.stream.on_taken()

    # --- the handshake ---------------------------------------------------------------

    def _on_record(self, answer: bytes) -> None:
        if self._handshake.state is HandshakeState.PROVED:
            self._reader, self.state = self._frames, ConnectionState.HELLO
        self.stream.opening = answer  # goes with our HELLO, if that may go at once
        if self._handshake.state is self._handshake.introduces_at:
            self._introduce(self)
        self.stream.write_uncounted()

    def _refuse(self, error: AuthenticationError | RemoteProtocolError) -> None:
        """Tell the peer that the handshake has failed, then end."""
        self._cause = type(error)(f"{self.where}: {error}")
        self.stream.write_uncounted(self._handshake.farewell)
        self.stream.close()

    def hello(self, hello: Hello) -> None:
        """Send our HELLO, which is not counted: it belongs to the transport."""
        self.stream.write_uncounted(prefix(FrameKind.HELLO, control=hello.encode()))

    def _take_hello(self, hello: Hello) -> None:
        self.peer = hello
        self._receipts.received = 0  # what is counted begins after the HELLO
        self._on_hello(self, hello)

    def open_to(self, sink: MessageSink) -> None:
        """Hand all further messages to `sink`."""
        self._frames.sink = sink
        self._frames.is_exact = False
        self._set_open()

    def open_as_lane(
        self,
        reader: ByteReader,
        control: Connection,
        *,
        on_writable: Callable[[], None],
        marks: WaterMarks,
    ) -> None:
        """Give all further bytes to the reader of a lane."""
        self.ack_through = control
        self._reader = reader
        self._frames.rest(0)  # it reads no more
        self._on_writable = on_writable
        self.stream.use_marks(marks)
        self._set_open()

    def _set_open(self) -> None:
        self.state = ConnectionState.OPEN
        if not self.opened.done() and self.peer is not None:
            self.opened.set_result(self.peer)

    async def until_open(self) -> Hello:
        """Wait until the peer's HELLO has been handled; return it."""
        try:
            return await self.opened  # the dialer has a limit; `_finish` fails it
        except asyncio.CancelledError:
            refused = self.peer is not None and self.peer.verdict
            if refused or self.state is not ConnectionState.OPEN:
                self.fail(ConnectError("the attempt to connect was cancelled"))
            raise

    # --- writing ---------------------------------------------------------------------

    def send(
        self,
        kind: int,
        call_id: int,
        *,
        flags: int = 0,
        aux: int = 0,
        head: bytes = b"",
        control: bytes = b"",
        buffers: Sequence[memoryview] = (),
        on_sent: Callable[[], None] | None = None,
    ) -> None:
        """Write a message; never waits.  On a closed connection it is dropped."""
        lengths = [buffer.nbytes for buffer in buffers] if buffers else ()
        if self.state is ConnectionState.CLOSED:
            pass
        elif not buffers and type(buffers) is not PendingBuffers:
            # As `prefix`, in one step less: most messages are such.
            header = HEADER.pack(
                MAGIC, VERSION, kind, flags, len(head), len(control), 0, aux, call_id, 0
            )
            self._write((header + head + control,))
        elif type(buffers) is PendingBuffers or sum(lengths) > INLINE_BYTES_MAX:
            message = OutgoingMessage(
                kind,
                call_id,
                flags=flags,
                aux=aux,
                head=head,
                control=control,
                buffers=buffers,
                on_sent=on_sent,
            )
            self.submit(message)
            return
        else:
            opening = prefix(
                kind,
                call_id,
                flags=flags,
                aux=aux,
                head=head,
                control=control,
                lengths=lengths,
                payload_bytes=sum(lengths),
            )
            parts: tuple[bytes | memoryview, ...] = (opening, *buffers)
            is_short = sum(lengths) <= JOINED_BYTES_MAX
            self._write((b"".join(parts),) if is_short else parts)
        if on_sent is not None:
            on_sent()

    def post(self, parts: Sequence[bytes | memoryview]) -> None:
        """Write a message that is ready in parts, in its turn among the others."""
        if self.state is not ConnectionState.CLOSED:
            self._write(parts)

    def push(self, part: bytes) -> None:
        """Write a message now, with all that waits for the end of this turn."""
        self.post((part,))
        self.stream.flush()

    async def writable(self) -> None:
        """Wait until the transport has room."""
        await self.stream.room.wait()  # set by the end of the connection, too
        if self.state is ConnectionState.CLOSED:
            raise ConnectionLostError(f"the connection to {self.where} has ended")

    # --- payloads --------------------------------------------------------------------

    @property
    def lanes(self) -> Lanes | None:
        """The carrier of large payloads, in both directions, once prepared."""
        return self.payloads.lanes

    def prepare_lanes(self, make: Callable[[Arrivals], Lanes]) -> None:
        """Let large payloads go over lanes, and come over them."""
        self.payloads.lanes = make(self._frames.arrivals)

    def share_memory(self, mover: PayloadRoute, places: Places) -> None:
        """Let `mover` take large payloads, and `places` find those that arrive."""
        self.payloads.mover = mover
        self._frames.places = places

    @property
    def bytes_copied(self) -> int:
        """Bytes of buffers copied in user space, received and sent, of all messages."""
        return self._reader.bytes_copied + self.bytes_gathered

    @property
    def message_bytes_copied(self) -> int:
        """Of the received bytes, those of the message that is being handed on."""
        return self._reader.message_bytes_copied

    # --- the other end ---------------------------------------------------------------

    @property
    def has_proved(self) -> bool:
        """Whether both ends have proved that they know the secret, if there is one."""
        return self.state is not ConnectionState.HANDSHAKE

    @property
    def credentials(self) -> PeerCredentials | None:
        """The process at the other end, where the kernel vouches for it."""
        return self.stream.credentials

    @property
    def scheme(self) -> str:
        """The transport's scheme; empty if there is none."""
        return self.stream.scheme

    @property
    def where(self) -> str:
        """The other end, for people to read."""
        return self.stream.where

    @property
    def token(self) -> int:
        """The number that names this connection at both ends."""
        relayed = self.peer.token if self.peer and self.role is Role.ACCEPTOR else 0
        return relayed or self._handshake.token

    @property
    def ticket(self) -> bytes:
        """The ticket of the peer's token; empty if it came without a token."""
        return self._handshake.ticket if self.role is Role.ACCEPTOR else b""

    # --- outliving the transport -----------------------------------------------------

    @property
    def is_broken(self) -> bool:
        """Whether it waits for another transport."""
        return self.resumption.is_broken

    @property
    def received(self) -> int:
        """How many bytes have been read since the peer's HELLO."""
        return self._receipts.received

    @property
    def first_unsent(self) -> int:
        """While it is broken, the first call that cannot have left; else `NEVER`."""
        return self.resumption.first_unsent

    def allow_resuming(
        self,
        on_broken: OnBroken,
        next_call_id: Callable[[], int] | None = None,
    ) -> None:
        """Outlive the transport from now on; the first byte counted is the next one."""
        self.on_broken = on_broken
        self.resumption.next_call_id = next_call_id
        ack_bytes = ACK_BYTES if self.ack_through is self else LANE_ACK_BYTES
        self.resumption.allow(partial(on_broken, self), ack_bytes)

    def send_ack(self, received: int, *, can_wait: bool) -> None:
        """Tell the peer how much has been read: now, or with the next message."""
        control = self.ack_through
        if control is not self:  # of a lane: its peer keeps much
            control.join(prefix(FrameKind.ACK, self.token, aux=received))
            return
        write = self.stream.hold if can_wait else self.stream.join
        write(prefix(FrameKind.ACK, 0, aux=received))

    def on_ack(self, received: int) -> None:
        """The peer has read so many of our bytes."""
        self.resumption.unacknowledged.acknowledge(received)

    def release_transport(self) -> Transport:
        """Give the transport away: this connection only had to bring it."""
        transport = self.stream.take_transport()
        if transport is None or self.peer is None:
            raise ConnectionLostError("the connection ended before it could resume")
        if not self.opened.done():
            self.opened.set_result(self.peer)
        transport.set_handler(Discard())  # until `adopt`
        self._finish(None)
        return transport

    # --- the end ---------------------------------------------------------------------

    def fail(self, error: AsyncRpcError) -> None:
        """Abort the connection because of `error`; what is queued is dropped."""
        self._cause = self._cause or error
        self.resumption.on(ResumeEvent.CLOSE)
        self.stream.abort()

    def _fail_aloud(self, error: AsyncRpcError) -> None:
        """Abort because of what the peer sent, and tell it, if still possible."""
        if self.on_broken is not None:
            self._say_close(f"it could not take what this worker sent: {error}")
        self.fail(error)

    def close(self, why: str = "") -> None:
        """Write what is queued, then end in order: the peer does not wait for us."""
        self.stream.write_ahead()
        if self.on_broken is not None:
            self._say_close(why)
        self.resumption.on(ResumeEvent.CLOSE)
        self.stream.flush()
        self.stream.close()

    def _say_close(self, why: str) -> None:
        control = self.ack_through
        lane = 0 if control is self else self.token
        control.send(FrameKind.CLOSE, lane, control=why.encode())
        control.stream.flush()  # before the end itself, which may go another way

    def on_peer_close(self, why: str) -> None:
        """The peer says that it closes the connection."""
        self.peer_closed = why or "it closed the connection"
        if self.resumption.on(ResumeEvent.PEER_CLOSE) is ResumeState.ENDED:
            self.end(ConnectionLostError(self.peer_closed))

    def end(self, error: AsyncRpcError) -> None:
        """End the connection at once; waiters are told before this returns."""
        self._cause = self._cause or error
        self.resumption.on(ResumeEvent.CLOSE)
        transport = self.stream.take_transport()
        if transport is None:
            return
        transport.set_handler(Discard())
        transport.abort()
        self._finish(None)

    def _finish(self, error: TransportError | None) -> None:
        """Tell all waiters: the connection has ended for good."""
        if self.state is ConnectionState.CLOSED:
            return
        self.state = ConnectionState.CLOSED
        self.resumption.end()
        self.stream.room.set()
        self.payloads.clear()
        cause = self._cause or error
        if not self.opened.done():
            self.opened.set_exception(cause or _closed_early(self.where))
            self.opened.exception()  # no task awaits that of an acceptor
        if not self.ended.done():
            self.ended.set_result(None)
        if self.on_lost is not None:
            self.on_lost(self, cause)


def _closed_early(where: str) -> ConnectionLostError:
    return ConnectionLostError(
        f"{where} closed the connection before it was open: it is shutting down, or is "
        f"not a worker of this cluster"
    )
