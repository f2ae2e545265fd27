"""What a connection does as a lane, or with lanes.

`Connection` is this and the rest: kept apart, so that either can be read alone.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from asyncrpc.wire.transfers import Arrivals

if TYPE_CHECKING:
    from asyncrpc.runtime.payloads.lanes import Lane, Lanes
    from asyncrpc.transport.abc import Transport
    from asyncrpc.transport.flow import WaterMarks
    from asyncrpc.wire.handshake import Handshake
    from asyncrpc.wire.reader import FrameReader


class LaneUser(ABC):
    """The part of a `Connection` that has to do with lanes."""

    lanes: Lanes | None
    _frames: FrameReader
    _is_reading_paused: bool
    _keep: Callable[[Sequence[bytes | memoryview]], None]
    _marks: WaterMarks | None
    _handshake: Handshake
    _on_writable: Callable[[], None]
    _reader: FrameReader | Lane
    _transport: Transport | None
    _writable: asyncio.Event

    @abstractmethod
    def _flush(self) -> None:
        """Write what this turn has joined."""

    @abstractmethod
    def _set_open(self) -> None:
        """Take note that both HELLOs are in."""

    @property
    def token(self) -> int:
        """What names this connection at both ends."""
        return self._handshake.token

    @property
    def scheme(self) -> str:
        """The transport's scheme."""
        return self._transport.scheme if self._transport is not None else ""

    @property
    def where(self) -> str:
        """The other end, for people to read."""
        return self._transport.remote if self._transport is not None else "nowhere"

    @property
    def is_writable(self) -> bool:
        """Whether the transport has room."""
        return self._writable.is_set()

    def write(self, *parts: bytes | memoryview) -> None:
        """Write parts of frames now, after what this turn of the loop has joined."""
        self._flush()
        if self._transport is not None:
            self._keep(parts)
            self._transport.send(parts)

    def prepare_lanes(self, make: Callable[[Arrivals], Lanes]) -> None:
        """Let large payloads go over lanes, and come over them."""
        self._frames.arrivals = Arrivals(self._deliver)
        self.lanes = make(self._frames.arrivals)

    def open_as_lane(
        self, lane: Lane, on_writable: Callable[[], None], marks: WaterMarks
    ) -> None:
        """Give all further bytes to a lane.

        Args:
            lane: takes them.
            on_writable: called when the transport has room again.
            marks: when it has.
        """
        self._reader = lane
        self._on_writable = on_writable
        self._marks = marks
        if self._transport is not None:
            self._transport.use_marks(marks)
        self._set_open()

    def pause_reading(self) -> None:
        """Take no more for now."""
        self._is_reading_paused = True
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Go on reading."""
        self._is_reading_paused = False
        if self._transport is not None:
            self._transport.resume_reading()

    def _deliver(self, *message: Any) -> None:
        """Give the sink a message whose payload came over lanes."""
        self._frames.message_bytes_copied = 0
        self._frames.sink.on_message(*message)
        if self.lanes is not None:
            self.lanes.acknowledge()
