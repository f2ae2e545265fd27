"""The ways by which a large message leaves: through shared memory, or in chunks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from asyncrpc.runtime.calls.deferred import PendingBuffers
from asyncrpc.runtime.payloads.lanes import Lanes
from asyncrpc.runtime.payloads.pump import ChunkPump
from asyncrpc.wire.frames import INLINE_BYTES_MAX
from asyncrpc.wire.outgoing import OutgoingEvent, OutgoingMessage, OutgoingMessages


class PayloadRoute(Protocol):
    """A way for large payloads that cannot take all of them."""

    def send(self, message: OutgoingMessage) -> bool:
        """Take a message and its payload, or refuse.

        Returns:
            False if another way must be tried; then the message is untouched.
        """

    def clear(self) -> None:
        """Forget all unsent messages, as the connection has ended."""


class PayloadRoutes:
    """The ways of one connection.

    Attributes:
        mover: moves payloads through shared memory; None if no memory is shared.
        lanes: hold payloads that the mover refuses while the first lane is opened.
        pump: sends the rest, over lanes or over the connection itself.
    """

    def __init__(
        self, pump: ChunkPump, outgoing: OutgoingMessages, send: Callable[..., None]
    ) -> None:
        """Begin with one way.

        Args:
            pump: takes every payload.
            outgoing: the messages of the connection that wait.
            send: `Connection.send`.
        """
        self.mover: PayloadRoute | None = None
        self.lanes: Lanes | None = None
        self.pump = pump
        self._outgoing = outgoing
        self._send = send
        self._is_closed = False

    def submit(self, message: OutgoingMessage) -> None:
        """Send a message, or let it wait; this method never waits.

        On a closed connection the message is dropped.
        """
        buffers = message.buffers
        if self._is_closed:
            self._outgoing.forget(message)
        elif isinstance(buffers, PendingBuffers) and not buffers.are_ready:
            # It waits until the peer has the regions; other messages overtake it.
            self._outgoing.wait(message, OutgoingEvent.BLOCK, buffers.forget)
            buffers.then(message, self.submit)
        elif sum(buffer.nbytes for buffer in buffers) > INLINE_BYTES_MAX:
            self._send_payload(message)
        else:
            self._send(
                message.kind,
                message.call_id,
                flags=message.flags,
                aux=message.aux,
                head=message.head,
                control=message.control,
                buffers=list(buffers),
                on_sent=partial(self._outgoing.sent, message),
            )

    def _send_payload(self, message: OutgoingMessage) -> None:
        """Send a message by the first way that takes it."""
        for way in (self.mover, self.lanes):
            if way is not None and way.send(message):
                return
        self.pump.send(message)

    def clear(self) -> None:
        """Drop all unsent messages, as the connection has ended."""
        self._is_closed = True
        for way in (self.mover, self.lanes, self.pump):
            if way is not None:
                way.clear()
        self._outgoing.clear()
