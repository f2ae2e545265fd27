"""Large payloads that go over the connection itself, in chunks between its messages."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, Protocol

from asyncrpc.wire.frames import Outgoing
from asyncrpc.wire.outbox import Outbox

# Chunks written in one go: 2 MiB, 0.4 ms at 5 GB/s.  Then the loop gets its turn.
CHUNKS_PER_TURN: Final = 4


class ChunkStream(Protocol):
    """The stream that chunks are written to."""

    room: asyncio.Event

    def write(self, parts: Sequence[bytes | memoryview]) -> None:
        """Write parts of frames, perhaps with those of the same turn of the loop."""

    def flush(self) -> None:
        """Write what is still to be written in this turn."""


class InBandPayloads:
    """The payloads of one connection that go over itself; a `PayloadRoute`."""

    def __init__(self, stream: ChunkStream, loop: asyncio.AbstractEventLoop) -> None:
        self._stream = stream
        self._loop = loop
        self._outbox = Outbox()
        self._pumping = False

    def send(self, message: Outgoing) -> bool:
        """Write a message, and its payload when there is room; never refuses one."""
        parts = self._outbox.message(**message._asdict())
        if parts:
            self._stream.write(parts)
        if self._outbox:
            self.pump()
        return True

    def drop(self, kind: int, call_id: int) -> bool:
        """Give up the payload of a message; return whether it was on its way."""
        if not self._outbox:
            return False
        parts = self._outbox.drop(kind, call_id)
        if parts is None:
            return False
        if parts:
            self._stream.write(parts)
        return True

    def clear(self) -> None:
        """The connection has ended: forget what was to be sent."""
        self._outbox.clear()

    def pump(self) -> None:
        """Hand payload chunks to the transport while it has room for them."""
        if self._pumping:
            return
        for _ in range(CHUNKS_PER_TURN):
            if not self._outbox or not self._stream.room.is_set():
                return
            self._stream.write(self._outbox.next_chunk())
            self._stream.flush()
        if self._outbox:
            self._pumping = True
            self._loop.call_soon(self._pump_on)

    def _pump_on(self) -> None:
        self._pumping = False
        self.pump()
