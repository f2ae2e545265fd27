"""Gives the chunks of large payloads to lanes that have room.

A small message must never wait behind a large one: so chunks leave over lanes (`lanes`)
as soon as lanes are open, and over lane 0, the connection of the messages, only while
no other lane is open.  The bytes written per turn of the loop are limited, because
copying a chunk blocks the loop.

`wire.chunks` decides the order of chunks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Protocol

from asyncrpc.core.transport.byte_stream import ByteStream
from asyncrpc.core.wire.chunks import ChunkScheduler, OutgoingTransfer
from asyncrpc.core.wire.frames import CHUNK_BYTES
from asyncrpc.core.wire.outgoing import OutgoingEvent, OutgoingMessage, OutgoingMessages

# The bytes that a turn writes over lane 0: 0.4 ms at 5 GB/s.  Then the loop runs.
OWN_TURN_BYTES: Final = 4 * CHUNK_BYTES

Chunk = list[bytes | memoryview]


class LaneWriter(Protocol):
    """The sending end of one lane: `OwnLane`, and the `Lane` of `lanes`.

    Attributes:
        rest: the unwritten rest of the present chunk.
    """

    rest: Any

    @property
    def stream(self) -> ByteStream:
        """The stream of the lane."""

    def write(self, limit_bytes: int) -> int:
        """Write the next bytes of the chunk; return how many."""


class OwnLane:
    """Lane 0: the connection of the messages.

    A chunk is written whole: a message may follow it at once.
    """

    def __init__(self, stream: ByteStream) -> None:
        self.rest: Chunk = []
        self.stream = stream

    def write(self, _limit_bytes: int) -> int:
        """Write the chunk; return its length in bytes."""
        chunk, self.rest = self.rest, []
        self.stream.write(chunk)
        self.stream.flush()
        return sum(map(len, chunk))


class ChunkPump:
    """The large payloads of one connection, on their way out.

    Attributes:
        lanes: the lanes that are open at both ends; if empty, lane 0 is used.
        ration: returns how many bytes may be written to lanes in the present turn.
    """

    def __init__(
        self,
        stream: ByteStream,
        outgoing: OutgoingMessages,
        *,
        loop: asyncio.AbstractEventLoop,
        post: Callable[[Sequence[bytes]], None],
    ) -> None:
        self.lanes: Sequence[LaneWriter] = ()
        self.ration: Callable[[], int] = lambda: OWN_TURN_BYTES
        self._own = [OwnLane(stream)]
        self._stream = stream
        self._outgoing = outgoing
        self._loop = loop
        self._post = post
        self._chunks = ChunkScheduler(outgoing.sent)
        self._is_pumping = False
        self._next = 0  # the lane that is asked first
        self._drained: asyncio.Future[None] | None = None

    @property
    def has_work(self) -> bool:
        """Whether a chunk, or a part of one, has not been written."""
        return bool(self._chunks) or any(lane.rest for lane in self.lanes)

    def send(self, message: OutgoingMessage) -> None:
        """Write a message, and its payload when there is room."""
        has_lanes = bool(self.lanes)
        transfer, opening = self._chunks.add(message, over_lanes=has_lanes)
        take_back = partial(self._take_back, transfer)
        self._outgoing.wait(message, OutgoingEvent.QUEUE, take_back)
        if has_lanes:
            self._stream.write_now(opening)  # a lane that is ahead would wait for it
        else:
            self._stream.write((opening,))
        self.pump()

    def _take_back(self, transfer: OutgoingTransfer) -> None:
        self._post((self._chunks.remove(transfer),))
        self._check_drained()

    def pump(self) -> None:
        """Give the next chunks to lanes with room, a limited number in each turn."""
        if self._is_pumping or not self.has_work:
            return
        self._is_pumping = True  # a callback of a sent message may send another
        bytes_left = ration = self.ration() if self.lanes else OWN_TURN_BYTES
        try:
            while bytes_left > 0 and (lane := self._free_lane()) is not None:
                if not lane.rest:
                    lane.rest.extend(self._chunks.next_chunk())
                bytes_left -= lane.write(bytes_left)
        finally:
            if bytes_left < ration and (self.lanes or self._chunks):
                self._loop.call_soon(self._pump_on)
            else:
                self._is_pumping = False
        self._check_drained()

    def _pump_on(self) -> None:
        self._is_pumping = False
        self.pump()

    def _free_lane(self) -> LaneWriter | None:
        lanes: Sequence[LaneWriter] = self.lanes or self._own
        for step in range(len(lanes)):
            lane = lanes[(self._next + step) % len(lanes)]
            if lane.stream.room.is_set() and (lane.rest or self._chunks):
                self._next += step + 1
                return lane
        return None

    async def drained(self) -> None:
        """Wait until every chunk has been written or dropped."""
        if self.has_work:
            self._drained = self._loop.create_future()
            await self._drained

    def _check_drained(self) -> None:
        drained = self._drained
        if drained is not None and not self.has_work and not drained.done():
            drained.set_result(None)

    def drop_all(self) -> None:
        """Drop all messages in chunks: the last lane has ended, and some are lost."""
        for message in self._chunks.clear():
            self._outgoing.forget(message)
        self._check_drained()

    def clear(self) -> None:
        """Forget all unsent chunks, as the connection has ended."""
        self._chunks.clear()
        self._check_drained()
