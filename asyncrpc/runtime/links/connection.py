"""Drives one connection: the handshake, then frames in and out of a transport.

The connection knows who the peer is and how to write messages to it; what they mean is
the `Link`'s business, which becomes the reader's sink once both HELLOs are in.

After any error in the stream its position is unknown: the connection is aborted.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from asyncrpc.errors import (
    AsyncRpcError,
    AuthenticationError,
    ConnectError,
    ConnectionLostError,
    MalformedError,
    RemoteProtocolError,
    TransportError,
)
from asyncrpc.runtime.calls.deferred import DeferredMessage
from asyncrpc.runtime.links.resuming import Resuming, keep_nothing
from asyncrpc.runtime.payloads.landing import Landing, fresh, zeros
from asyncrpc.runtime.spinning import Spinner
from asyncrpc.transport.abc import PeerCredentials, Transport
from asyncrpc.wire.frames import INLINE_BYTES_MAX, FrameKind, Outgoing, prefix
from asyncrpc.wire.handshake import NONCE_BYTES, Handshake, Role
from asyncrpc.wire.messages import Hello
from asyncrpc.wire.outbox import Outbox
from asyncrpc.wire.placed import Places
from asyncrpc.wire.reader import FrameReader, MessageSink, ReaderLimits

if TYPE_CHECKING:
    from asyncrpc.transport.address import Address

logger = logging.getLogger("asyncrpc")

# Chunks written in one go: 2 MiB, 0.4 ms at 5 GB/s.  Then the loop gets its turn.
CHUNKS_PER_TURN: Final = 4


# Up to here a message is written as one piece: a copy costs less than a second buffer.
JOINED_BYTES_MAX: Final = 8 << 10

# Up to here joining costs less than the kernel takes for that many separate buffers.
JOIN_BYTES_MAX: Final = 64 << 10


class ConnectionState(enum.Enum):
    """How far a connection has come."""

    HANDSHAKE = "proofs are exchanged"
    HELLO = "waits for the peer's name"
    OPEN = "open"
    CLOSED = "closed"


class Mover(Protocol):
    """Another way for large payloads than the bytes of the connection itself."""

    def send(self, message: Outgoing) -> bool:
        """Take a message and its payload over, as `Connection.send` would; or refuse.

        Returns:
            False if the connection is to send it itself; then nothing was done.
        """

    def drop(self, kind: int, call_id: int) -> bool:
        """Give up a message taken over and not sent; say whether there was one."""

    def clear(self) -> None:
        """The connection has ended: forget what was to be sent."""


class Connection(Resuming):
    """One connection to one peer, from the first byte on.

    Attributes:
        role: which end this is.
        peer: the peer's HELLO, once it is in.
        reads: how often something has been read.
        awaited: calls that have not been answered; not empty: polling goes on.
        spinner: polls for what comes after a write, if the worker wants that.
        mover: takes large payloads, if there is one.
        lanes: take those that it leaves, once they have been prepared.
        address: where it was dialed, if it was.
        bytes_gathered: of buffers sent, those copied together before.
        opened: done once the peer's HELLO is in; fails if the connection ends before.
        ended: done when the connection has ended.
    """

    def __init__(
        self,
        role: Role,
        secret: bytes | None,
        *,
        loop: asyncio.AbstractEventLoop,
        limits: ReaderLimits,
        make_buffer: Callable[[int], memoryview] = fresh,
        nonce: bytes | None = None,
        on_proved: Callable[[Connection], None],
        on_hello: Callable[[Connection, Hello], None],
    ) -> None:
        self.role = role
        self.state = ConnectionState.HANDSHAKE
        self.peer: Hello | None = None
        self.opened: asyncio.Future[Hello] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.on_made: Callable[[Connection], None] | None = None
        self.on_lost: Callable[[Connection, AsyncRpcError | None], None] | None = None
        self._secret = secret
        self._loop = loop
        self._on_proved = on_proved
        self._on_hello = on_hello
        self._handshake = Handshake(role, secret, nonce or os.urandom(NONCE_BYTES))
        self._record = bytearray()
        self._record_place = memoryview(bytearray(64))
        self._landing = Landing(make_buffer)
        self._frames = FrameReader(self, self._landing.allocate, limits)
        self._frames.is_exact = True  # a lane's first chunk may follow the HELLO
        self._reader = self._frames
        self.bytes_gathered = 0
        self._outbox = Outbox()
        self._prepare_resuming()
        self._writable = asyncio.Event()
        self._writable.set()
        self._pumping = False
        self._turn: list[bytes | memoryview] | None = None  # written later this turn
        self._cause: AsyncRpcError | None = None
        self._transport: Transport | None = None
        self.mover: Mover | None = None
        self._held: list[DeferredMessage] = []
        self._ahead: list[bytes] = []  # goes with the next message
        self.spinner: Spinner | None = None
        self.reads = 0
        self.awaited: Mapping[int, object] = {}
        self.lanes = None
        self.address: Address | None = None
        self._on_writable = self._pump

    # --- the transport's side (StreamHandler) ----------------------------------------

    def connection_made(self, transport: Transport) -> None:
        """Begin the handshake."""
        self._transport = transport
        self._handshake.binding = transport.channel_binding
        if self.on_made is not None:
            self.on_made(self)
        if self._cause is not None:  # it was given up before it was made
            transport.abort()
        elif opening := self._handshake.start():
            transport.send((opening,))

    def get_buffer(self, _sizehint: int = -1, /) -> memoryview:
        """Return where the next bytes must land."""
        if self.state is ConnectionState.HANDSHAKE:
            return self._record_place[: self._handshake.wanted - len(self._record)]
        return self._reader.get_buffer()

    def buffer_updated(self, nbytes: int, /) -> None:
        """Take what has landed; any error in it ends the connection."""
        try:
            if self.state is ConnectionState.HANDSHAKE:
                self._on_record(nbytes)
            else:
                spinner = self.spinner
                self.reads += 1
                self.received += nbytes
                if spinner is not None:
                    spinner.read()
                self._reader.advance(nbytes)
                if self.received >= self._ack_at:
                    self.acknowledge()
                if spinner is not None and self.awaited:
                    spinner.wait()
        except (AuthenticationError, RemoteProtocolError) as error:
            if self.state is ConnectionState.HANDSHAKE:
                self._refuse(error)
            else:
                logger.warning("%s sent what makes no sense: %s", self.where, error)
                self._fail_aloud(error)
        except Exception as error:
            # Whatever a message of a peer sets off here must not stop the loop.
            logger.exception("a message from %s could not be handled", self.where)
            self._fail_aloud(
                MalformedError(f"a message that could not be handled: {error!r}")
            )

    def connection_lost(self, error: TransportError | None, /) -> None:
        """Wait for another transport, or tell whoever waits for this one."""
        if self._may_resume():
            self._break(error)
        else:
            self._finish(error)

    def _finish(self, error: TransportError | None) -> None:
        """Tell whoever waits: the connection has ended for good."""
        if self.state is ConnectionState.CLOSED:
            return
        self.state = ConnectionState.CLOSED
        self.kept.clear()
        self._keep = keep_nothing
        self.mended.set()
        self._writable.set()
        self._outbox.clear()
        held_back, self._held = self._held, []
        for held in held_back:
            held.give_up()
        if self.mover is not None:
            self.mover.clear()
        if self.lanes is not None:
            self.lanes.clear()
        cause = self._cause or error
        if not self.opened.done():
            self.opened.set_exception(cause or self._closed_early())
            self.opened.exception()  # an acceptor's is awaited by nobody
        if not self.ended.done():
            self.ended.set_result(None)
        if self.on_lost is not None:
            self.on_lost(self, cause)

    def pause_writing(self) -> None:
        """Hold back payloads; messages still go."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """Go on with the payloads."""
        self._writable.set()
        self._on_writable()

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
        """Write a message; never waits.  On a closed connection it is dropped.

        Args:
            kind: its kind.
            call_id: its call.
            flags: of the header.
            aux: of the header.
            head: routing.
            control: the value.
            buffers: the payload: not to change until it is written.
            on_sent: called once the message has been handed to the transport whole,
                or has been dropped.
        """
        if self._transport is None or self.state is ConnectionState.CLOSED:
            if on_sent is not None:
                on_sent()
            return
        if type(buffers) is DeferredMessage:
            self._hold(
                buffers,
                Outgoing(kind, call_id, flags, aux, head, control, on_sent=on_sent),
            )
            return
        lengths = [buffer.nbytes for buffer in buffers]
        total = sum(lengths)
        if total <= JOINED_BYTES_MAX:
            opening = prefix(
                kind,
                call_id,
                flags=flags,
                aux=aux,
                head=head,
                control=control,
                lengths=lengths,
                payload_bytes=total,
            )
            self._write((b"".join((opening, *buffers)) if buffers else opening,))
            if on_sent is not None:
                on_sent()
            return
        message = Outgoing(kind, call_id, flags, aux, head, control, buffers, on_sent)
        taken = self.mover is not None and self.mover.send(message)
        if not taken and self.lanes is not None and total > INLINE_BYTES_MAX:
            taken = self.lanes.send(message)
        if not taken:
            self.send_in_band(message)

    def _hold(self, held: DeferredMessage, message: Outgoing) -> None:
        """Keep a message until what it refers to is at the peer; others pass it by."""

        def send() -> None:
            self._held.remove(held)
            self.send(**message._replace(buffers=list(held))._asdict())

        held.hold((message.kind, message.call_id), send, message.on_sent)
        self._held.append(held)

    def _drop_held(self, key: tuple[int, int]) -> bool:
        dropped = [held for held in self._held if held.key == key]
        self._held = [held for held in self._held if held.key != key]
        for held in dropped:
            held.give_up()
        return bool(dropped)

    def send_in_band(self, message: Outgoing) -> None:
        """Send a message and its payload over this connection itself; see `send`."""
        parts = self._outbox.message(**message._asdict())
        if parts:
            self._write(parts)
        if self._outbox:
            self._pump()

    def drop(self, kind: int, call_id: int) -> bool:
        """Give up sending the payload of a message, if it is still on its way.

        Returns:
            Whether it was: then the peer never reads that message.
        """
        if self._held and self._drop_held((kind, call_id)):
            return True
        if self.mover is not None and self.mover.drop(kind, call_id):
            return True
        if self.lanes is not None and self.lanes.drop(kind, call_id):
            return True
        if not self._outbox:
            return False
        parts = self._outbox.drop(kind, call_id)
        if parts is None:
            return False
        if parts:
            self._write(parts)
        return True

    def forget_transfer(self, kind: int, call_id: int) -> bytes | None:
        """Do not deliver a message whose payload is arriving.

        Returns:
            Its control part; None if there is no such message.
        """
        return self._frames.drop_transfer(kind, call_id)

    def read_places(self, places: Places) -> None:
        """Take messages whose buffers lie in shared memory, which `places` finds."""
        self._frames.places = places

    def watch_requests(self, begun: Callable[[int, int], None]) -> None:
        """Have `begun` told of call and bytes of each large request that begins."""
        self._frames.on_request = begun

    def stand_in(self, unreadable: Callable[[str], bytes]) -> None:
        """Have `unreadable` stand for what there is no memory for."""
        self._frames.unreadable = unreadable

    def claim(self, call_id: int, memory: memoryview) -> None:
        """Let the only buffer of a call's response land in `memory`, if it fits."""
        self._landing.claims[call_id] = memory

    def release_claim(self, call_id: int) -> None:
        """End a claim: from now on nothing is written to its memory."""
        if self._landing.claims.pop(call_id, None) is not None:
            self._frames.move_transfer(FrameKind.RESPONSE, call_id, zeros)

    async def writable(self) -> None:
        """Wait until the transport has room.

        Raises:
            ConnectionLostError: the connection ended meanwhile.

        Cancellation:
            Nothing has changed.
        """
        await self._writable.wait()  # set by the end of the connection, too
        if self.state is ConnectionState.CLOSED:
            raise ConnectionLostError(f"the connection to {self.where} has ended")

    def post(self, parts: Sequence[bytes | memoryview]) -> None:
        """Write a message that is ready in parts, in its turn among the others."""
        if self._transport is not None and self.state is not ConnectionState.CLOSED:
            self._write(parts)

    def push(self, part: bytes) -> None:
        """Write a message now, with all that waits for the end of this turn."""
        self.post((part,))
        self._flush()

    def join(self, part: bytes) -> None:
        """Write a message that can wait: with the next one, or in the loop's next turn.

        It is written before every message that is sent later.
        """
        if self._turn is not None:
            self._turn.append(part)
            return
        if not self._ahead:
            self._loop.call_soon(self._write_ahead)
        self._ahead.append(part)

    def _write_ahead(self) -> None:
        if self._ahead:
            self._write(())

    def _write(self, parts: Sequence[bytes | memoryview]) -> None:
        """Write the first message of a loop turn at once, and join those after it.

        One alone loses no time; of many, all but the first cost one system call.
        """
        if self._turn is not None:
            self._turn += parts
        elif self._transport is not None:
            self._turn = []
            self._loop.call_soon(self._end_turn)
            if self._ahead:
                parts, self._ahead = (*self._ahead, *parts), []
            self._keep(parts)
            self._transport.send(parts)

    def _end_turn(self) -> None:
        self._flush()
        self._turn = None
        if self.spinner is not None:
            self.spinner.wait()

    def _flush(self) -> None:
        """Write what this turn has joined."""
        if self._turn and self._transport is not None:
            parts = _joined(self._turn)
            self._turn = []
            self._keep(parts)
            self._transport.send(parts)

    def _pump(self) -> None:
        """Hand payload chunks to the transport while it has room for them."""
        if self._pumping or self._transport is None:
            return
        for _ in range(CHUNKS_PER_TURN):
            if not self._outbox or not self._writable.is_set():
                return
            self._write(self._outbox.next_chunk())
            self._flush()
        if self._outbox:
            self._pumping = True
            self._loop.call_soon(self._pump_on)

    def _pump_on(self) -> None:
        self._pumping = False
        self._pump()

    # --- opening and ending ----------------------------------------------------------

    @property
    def credentials(self) -> PeerCredentials | None:
        """Who is at the other end, where the kernel vouches for it."""
        return self._transport.credentials if self._transport is not None else None

    @property
    def bytes_copied(self) -> int:
        """Bytes of buffers copied in user space, received and sent, of all messages."""
        return self._reader.bytes_copied + self.bytes_gathered

    @property
    def message_bytes_copied(self) -> int:
        """Of the received ones, those of the message that is being handed on."""
        return self._reader.message_bytes_copied

    def hello(self, hello: Hello) -> None:
        """Send our HELLO, which is not counted: it belongs to the transport."""
        if self._transport is not None:
            self._transport.send((prefix(FrameKind.HELLO, control=hello.encode()),))

    def open_to(self, sink: MessageSink) -> None:
        """Hand all further messages to `sink`."""
        self._frames.sink = sink
        self._frames.is_exact = False
        self._set_open()

    async def until_open(self) -> Hello:
        """Wait for the peer's HELLO, and what is made of it.

        Raises:
            TransportError: the connection has ended before.

        Cancellation:
            The connection is aborted, unless it is open: then it may be in use before
            whoever waits here has its turn.
        """
        try:
            return await self.opened  # who dials has a limit; `_finish` fails it
        except asyncio.CancelledError:
            refused = self.peer is not None and self.peer.verdict
            if refused or self.state is not ConnectionState.OPEN:
                self.fail(ConnectError("given up"))
            raise

    def _set_open(self) -> None:
        self.state = ConnectionState.OPEN
        if not self.opened.done() and self.peer is not None:
            self.opened.set_result(self.peer)

    def fail(self, error: AsyncRpcError) -> None:
        """Abort the connection because of `error`; what is queued is dropped."""
        if self._cause is None:
            self._cause = error
        if self._transport is not None:
            self._transport.abort()

    def close(self, why: str = "") -> None:
        """Write what is queued, then end in order: the peer does not wait for us."""
        self._write_ahead()
        if self._transport is not None and self.on_broken is not None:
            self._say_close(why)
        self._closing = True
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def on_message(  # noqa: PLR0917  (a call per message: no object in between)
        self,
        kind: int,
        flags: int,
        call_id: int,
        aux: int,
        head: bytes,
        control: bytes,
        buffers: list[memoryview],
    ) -> None:
        """Take the peer's HELLO: until it is in, nothing else is allowed."""
        if kind != FrameKind.HELLO or self.peer is not None:
            raise MalformedError(f"a {FrameKind(kind).name} before the HELLO")
        self.peer = Hello.decode(control)
        self.received = 0  # what is counted begins after the HELLO
        self._on_hello(self, self.peer)

    def on_transfer_dropped(self, kind: int, call_id: int) -> None:
        """No transfer can have begun before the HELLO."""
        raise MalformedError(f"a DROP of {kind} {call_id} before the HELLO")

    def _on_record(self, nbytes: int) -> None:
        self._record += self._record_place[:nbytes]
        if len(self._record) < self._handshake.wanted:
            self._handshake.check_beginning(self._record)
            return
        record, self._record = bytes(self._record), bytearray()
        answer = self._handshake.receive(record)
        if answer and self._transport is not None:
            self._transport.send((answer,))
        if not self._handshake.wanted:
            self.state = ConnectionState.HELLO
            self._on_proved(self)

    def _refuse(self, error: AuthenticationError | RemoteProtocolError) -> None:
        """Tell the peer that the handshake has failed, then end."""
        self._cause = type(error)(f"{self.where}: {error}")
        if self._transport is not None:
            if farewell := self._handshake.farewell:
                self._transport.send((farewell,))
            self._transport.close()

    def _fail_aloud(self, error: AsyncRpcError) -> None:
        """Abort because of what the peer sent, and tell it, if that can still be."""
        if self.on_broken is not None:
            self._say_close(f"it could not take what this worker sent: {error}")
            self._flush()
        self.fail(error)

    def _say_close(self, why: str) -> None:
        control = self.ack_through
        lane = 0 if control is self else self.token
        control.send(FrameKind.CLOSE, lane, control=why.encode())

    def _whole(self) -> Connection:
        return self

    def _closed_early(self) -> ConnectionLostError:
        return ConnectionLostError(
            f"{self.where} closed the connection before it was open: it is shutting "
            f"down, or is not a worker of this cluster"
        )


def _joined(parts: list[bytes | memoryview]) -> Sequence[bytes | memoryview]:
    """Return parts as few buffers: short ones are joined, long ones left alone."""
    if sum(map(len, parts)) <= JOIN_BYTES_MAX:
        return (b"".join(parts),)
    return parts
