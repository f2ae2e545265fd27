"""Two connections, with bytes between them that move only when a test says so."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

from asyncrpc.core.links.connection import Connection
from asyncrpc.core.transport.abc import Buffer, StreamHandler, Transport
from asyncrpc.core.transport.flow import WaterMarks
from asyncrpc.core.wire.frames import FrameKind, Hello
from asyncrpc.core.wire.handshake import NONCE_BYTES, Handshake, Role
from asyncrpc.core.wire.limits import MessageLimits
from asyncrpc.errors import AsyncRpcError, ConnectionLostError

CUT = ConnectionLostError("cut")
REFUSED = "it has given up this connection"


class Line(Transport):
    """One end of a transport; what is sent waits until it is delivered."""

    remote = "mem://other"
    scheme = "mem"

    def __init__(self, handler: StreamHandler) -> None:
        self.handler = handler
        self.other = self
        self.sent = bytearray()
        self.is_closing = False
        self.is_ended = False
        self.is_reading = True
        self.marks: WaterMarks | None = None

    def send(self, buffers: Sequence[Buffer]) -> None:
        if not self.is_ended:
            for buffer in buffers:
                self.sent += buffer

    @property
    def queued_bytes(self) -> int:
        return len(self.sent)

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True

    def use_marks(self, marks: WaterMarks) -> None:
        self.marks = marks

    def set_handler(self, handler: StreamHandler) -> None:
        self.handler = handler

    def close(self) -> None:
        """End both ends in order, once what was sent has been delivered."""
        self.is_closing = True
        self.deliver()

    def abort(self) -> None:
        self.lose(None)
        self.other.lose(CUT)

    def lose(self, error: ConnectionLostError | None) -> None:
        if not self.is_ended:
            self.is_ended = True
            loop = asyncio.get_running_loop()
            loop.call_soon(lambda: self.handler.connection_lost(error))

    def deliver(self, bytes_max: int = 1 << 30) -> int:
        """Give the other end what has been sent; return how many bytes."""
        delivered = 0
        other = self.other
        while self.sent and delivered < bytes_max and other.is_reading:
            if other.is_ended:
                break
            place = memoryview(self.other.handler.get_buffer(-1))
            nbytes = min(len(place), len(self.sent), bytes_max - delivered)
            place[:nbytes] = self.sent[:nbytes]
            del self.sent[:nbytes]
            self.other.handler.buffer_updated(nbytes)
            delivered += nbytes
        if self.is_closing and not self.sent:
            self.lose(None)
            other.lose(None)
        return delivered


def join(dialer: Connection, acceptor: Connection) -> Line:
    """Give two connections a transport; return the dialer's end."""
    near, far = Line(dialer), Line(acceptor)
    near.other, far.other = far, near
    acceptor.connection_made(far)
    dialer.connection_made(near)
    return near


class Received:
    """The messages that one side has got."""

    def __init__(self) -> None:
        self.messages: list[tuple[int, bytes, bytes]] = []

    def on_message(  # noqa: PLR0917  (as of every sink)
        self,
        kind: int,
        flags: int,
        call_id: int,
        aux: int,
        head: bytes,
        control: bytes,
        buffers: list[memoryview],
    ) -> None:
        self.messages.append((call_id, bytes(control), b"".join(buffers)))

    def on_transfer_dropped(self, kind: int, call_id: int) -> None:
        raise AssertionError


class Side(Received):
    """One end of a resumable connection, and what its directory would do for it.

    Attributes:
        broken: why its transports have broken, as it was told.
        lost: why it has ended, once it has.
        acks: how many bytes the other end says it has read.
    """

    def __init__(self, name: str, role: Role) -> None:
        super().__init__()
        self.name = name
        self.broken: list[str] = []
        self.lost: list[str] = []
        self.acks: list[int] = []
        self.refuses = False
        self.next_call_id = 1
        self.connection = self.make(role)
        self.connection.on_lost = self._on_lost

    def make(self, role: Role, **hello: Any) -> Connection:
        """Make a connection that introduces itself as soon as it may."""

        def introduce(connection: Connection) -> None:
            if role is Role.DIALER:
                connection.hello(self.hello(**hello))

        return Connection(
            Handshake(role, b"secret", os.urandom(NONCE_BYTES)),
            loop=asyncio.get_running_loop(),
            limits=MessageLimits(),
            introduce=introduce,
            on_hello=self._on_hello,
        )

    def hello(self, **more: Any) -> Hello:
        return Hello(self.name, len(self.name), -1, 1, **more)

    def _on_hello(self, connection: Connection, hello: Hello) -> None:
        is_acceptor = connection.role is Role.ACCEPTOR
        if connection is not self.connection:
            if is_acceptor:
                self._answer(connection)
            self._resume(connection, hello)
            return
        if is_acceptor:
            connection.hello(self.hello())
        connection.open_to(self)
        connection.allow_resuming(self._on_broken, lambda: self.next_call_id)

    def _answer(self, bearer: Connection) -> None:
        if self.refuses:
            bearer.hello(self.hello(verdict=REFUSED))
            return
        self.connection.resumption.break_off("the peer resumes it")
        bearer.hello(self.hello(received=self.connection.received))

    def _resume(self, bearer: Connection, hello: Hello) -> None:
        if self.refuses or hello.verdict:
            bearer.open_to(Received())
            bearer.close()
            if hello.verdict:
                self.connection.end(ConnectionLostError(hello.verdict))
            return
        transport = bearer.release_transport()
        try:
            self.connection.resumption.adopt(transport, hello.received)
        except AsyncRpcError as error:
            transport.abort()
            self.connection.end(error)
            return
        self.connection.resumption.mended.set()

    def _on_broken(self, connection: Connection, error: Exception | None) -> None:
        self.broken.append(str(error))

    def _on_lost(self, connection: Connection, error: Exception | None) -> None:
        assert connection is self.connection
        self.lost.append(str(error))

    def on_message(  # noqa: PLR0917  (as of every sink)
        self,
        kind: int,
        flags: int,
        call_id: int,
        aux: int,
        head: bytes,
        control: bytes,
        buffers: list[memoryview],
    ) -> None:
        """Take note of a message, and of what a link would tell its connection."""
        if kind == FrameKind.ACK:
            if not call_id:
                self.acks.append(aux)
                self.connection.on_ack(aux)
            elif self.connection.lanes is not None:
                self.connection.lanes.on_ack(call_id, aux)
        elif kind == FrameKind.CLOSE:
            if not call_id:  # else it is of a lane
                self.connection.on_peer_close(bytes(control).decode())
        elif kind == FrameKind.LANES and self.connection.lanes is not None:
            self.connection.lanes.on_asked(aux)
        else:
            super().on_message(kind, flags, call_id, aux, head, control, buffers)

    def send(self, call_id: int, control: bytes, *payload: bytes) -> None:
        buffers = [memoryview(piece) for piece in payload]
        self.connection.send(
            FrameKind.REQUEST, call_id, control=control, buffers=buffers
        )


class Both:
    """A dialer `a`, an acceptor `b`, and the transport that they have now."""

    def __init__(self) -> None:
        self.a = Side("a", Role.DIALER)
        self.b = Side("b", Role.ACCEPTOR)
        self.line = join(self.a.connection, self.b.connection)

    async def settle(self) -> None:
        """Deliver everything, until nothing more is written."""
        idle = 0
        while idle < 3:  # what a turn joins is written at its end
            await asyncio.sleep(0)
            moved = self.line.deliver() + self.line.other.deliver()
            idle = 0 if moved else idle + 1

    async def turn(self) -> None:
        """Let both write what this turn has joined, and deliver none of it."""
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def cut(self) -> None:
        """Break the transport for both, with all that has not been delivered."""
        for end in (self.line, self.line.other):
            end.sent.clear()
            end.lose(CUT)
        await asyncio.sleep(0)

    async def resume(self) -> None:
        """Dial again, as the directory of `a` does."""
        target = self.a.connection
        target.resumption.break_off("another transport takes its place")
        bearer = self.a.make(Role.DIALER, resume=target.token, received=target.received)
        self.line = join(bearer, self.b.make(Role.ACCEPTOR))
        await self.settle()

    async def end(self) -> None:
        for side in (self.a, self.b):
            side.connection.end(ConnectionLostError("the test is over"))
        await asyncio.sleep(0)


async def opened() -> Both:
    """Return two connections whose HELLOs are in."""
    both = Both()
    await both.settle()
    return both
