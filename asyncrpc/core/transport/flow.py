"""Flow control: the limits every transport shares.

A transport never refuses bytes: `send` cannot fail for what the network does.  Instead
it tells the handler when to hold back.  Between the two marks nothing is said, so that
a queue that hovers around one of them does not flood the handler with events.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from asyncrpc.core.transport.abc import StreamHandler
from asyncrpc.errors import UsageError

# A loop that is woken to refill needs about 100 us; at 10 GB/s the network eats 1 MiB
# in that time.  Less would let it run dry, more only adds to what a small call behind
# it has to wait for.
HIGH_WATER_BYTES: Final = 1 << 20
# A quarter: the refill starts with 25 us of work left, and events come at most once
# per 768 KiB.
LOW_WATER_BYTES: Final = 256 << 10
# How long `close` waits for the peer to take what is queued.  As long as a worker may
# be expected to be busy with something else, and no longer than a person waits at exit.
LINGER_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class WaterMarks:
    """When to hold back (`high_bytes`) and when to go on (`low_bytes`)."""

    high_bytes: int = HIGH_WATER_BYTES
    low_bytes: int = LOW_WATER_BYTES

    def __post_init__(self) -> None:
        if not 0 <= self.low_bytes <= self.high_bytes:
            raise UsageError(
                f"water marks must satisfy 0 <= low <= high; "
                f"got low {self.low_bytes} and high {self.high_bytes} bytes"
            )


class Gauge:
    """Counts queued bytes and tells a handler when a mark is crossed."""

    __slots__ = ("_handler", "_marks", "_paused", "queued_bytes")

    def __init__(self, handler: StreamHandler, marks: WaterMarks) -> None:
        self._handler = handler
        self._marks = marks
        self._paused = False
        self.queued_bytes = 0

    def set_handler(self, handler: StreamHandler) -> None:
        """Tell another handler from now on."""
        self._handler = handler

    def use(self, marks: WaterMarks) -> None:
        """Judge by other marks from now on; the queue is below its low one."""
        self._marks = marks

    def add(self, nbytes: int) -> None:
        """Count bytes that were queued."""
        self.queued_bytes += nbytes
        if not self._paused and self.queued_bytes > self._marks.high_bytes:
            self._paused = True
            self._handler.pause_writing()

    def remove(self, nbytes: int) -> None:
        """Count bytes that have left."""
        self.queued_bytes -= nbytes
        if self._paused and self.queued_bytes <= self._marks.low_bytes:
            self._paused = False
            self._handler.resume_writing()

    def clear(self) -> None:
        """Forget everything, without an event: the connection is over."""
        self.queued_bytes = 0
        self._paused = False
