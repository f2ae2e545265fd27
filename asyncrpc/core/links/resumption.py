"""How a connection outlives its transport.

Who dials again, and for how long, is in `reconnector`; what is counted and kept, and
what becomes of the connection in the end, in `wire.resume`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from asyncrpc.core.links.disconnected import Discard, DisconnectedTransport
from asyncrpc.core.transport.abc import Transport
from asyncrpc.core.transport.byte_stream import discard_parts
from asyncrpc.core.wire.resume import (
    NEVER,
    Receipts,
    ResumeEvent,
    ResumeState,
    ResumeStatus,
    RetransmitBuffer,
)
from asyncrpc.errors import ConnectionLostError, TransportError

if TYPE_CHECKING:
    from asyncrpc.core.links.connection import Connection

# Of more, whoever answers is told each time that an ACK is due: answers may be small.
KEPT_BYTES_MIN: Final = 1 << 20


class Resumption:
    """The part of one connection that replaces its transport.

    Attributes:
        unacknowledged: what was sent and not acknowledged.
        receipts: how much has been read, and how much of that the peer knows.
        mended: set unless the connection is broken: also when it has ended.
        first_unsent: while it is broken, the first call that cannot have left; else
            `NEVER`.
        next_call_id: tells the number that the next call would have.
    """

    def __init__(self, connection: Connection) -> None:
        self._status = ResumeStatus()
        self.unacknowledged = RetransmitBuffer()
        self.receipts = Receipts()
        self.mended = asyncio.Event()
        self.mended.set()
        self.first_unsent = NEVER
        self.next_call_id: Callable[[], int] | None = None
        self._connection = connection
        self._stream = connection.stream
        self._on_broken: Callable[[TransportError | None], None] | None = None

    @property
    def is_broken(self) -> bool:
        """Return whether the connection waits for another transport."""
        return self._status.is_broken

    def on(self, event: ResumeEvent) -> ResumeState:
        """Take an event; return what has become of the connection."""
        return self._status.on(event)

    def allow(
        self, on_broken: Callable[[TransportError | None], None], ack_bytes: int
    ) -> None:
        """Outlive the transport from now on; the first byte counted is the next one."""
        self.on(ResumeEvent.ALLOW)
        self._on_broken = on_broken
        self.receipts.begin(ack_bytes)
        self._stream.keep = self.unacknowledged.add

    def acknowledge(self, news_bytes: int = 1) -> None:
        """Say how much has been read, if the peer does not know of so many bytes."""
        if self.receipts.has_news(news_bytes):
            self._connection.send_ack(self.receipts.acknowledge(), can_wait=False)
        else:
            self._stream.write_ahead()

    def count_kept(self) -> int:
        """Return what is kept of what was written, in bytes, once all is written.

        What is queued counts beside what is not acknowledged: a loop, or encryption,
        may keep a copy.
        """
        self._stream.flush()
        return self.unacknowledged.nbytes + self._stream.queued_bytes

    def on_due(self) -> None:
        """An ACK is due: it goes with the next message, most often an answer.

        If none has gone since the last time, it goes by itself.
        """
        self._connection.send_ack(
            self.receipts.acknowledge(), can_wait=not self._stream.has_ahead
        )
        if self.unacknowledged.nbytes > KEPT_BYTES_MIN:
            self._stream.on_kept()

    def lose(self, error: TransportError | None) -> bool:
        """The transport has ended; return whether the connection goes on without."""
        if self.on(ResumeEvent.LOSE) is not ResumeState.BROKEN:
            return False
        self._disconnect(error)
        return True

    def break_off(self, reason: str) -> None:
        """Give up a transport over which nothing arrives, but not the connection.

        The peer may have no sign of it: the side that dialed dials again.
        """
        transport = self._stream.transport
        if transport is None or self.is_broken:
            return
        self.on(ResumeEvent.REPLACE)
        if self.is_broken:
            where = self._stream.where
            self._disconnect(ConnectionLostError(f"{where}: {reason}"))
            transport.set_handler(Discard())
            transport.abort()

    def _disconnect(self, error: TransportError | None) -> None:
        """Wait for another transport."""
        was = self._stream.transport
        assert was is not None  # as the state says
        assert self._on_broken is not None  # as the state says
        self._stream.transport = DisconnectedTransport(
            self._connection, was, self._connection.fail
        )
        self._stream.room.clear()
        self.mended.clear()
        if self.next_call_id is not None:
            self.first_unsent = self.next_call_id()
        self._on_broken(error)

    def adopt(self, transport: Transport, received: int) -> None:
        """Go on over another transport; the caller sets `mended`."""
        if not self.is_broken:
            raise ConnectionLostError("the connection ends, and cannot be resumed")
        rest = self.unacknowledged.rest(received)
        self.on(ResumeEvent.RESUME)
        self.first_unsent = NEVER
        self._stream.go_on(transport, self._connection, rest)
        self.receipts.acknowledge()  # it has just been said
        if self._stream.room.is_set():
            self._connection.resume_writing()

    async def settled(self) -> None:
        """Wait until the connection is not broken: it goes on, or has ended."""
        await self.mended.wait()

    def end(self) -> None:
        """Forget everything: the connection has ended for good."""
        self.on(ResumeEvent.END)
        self.unacknowledged.clear()
        self._stream.keep = discard_parts
        self.mended.set()
