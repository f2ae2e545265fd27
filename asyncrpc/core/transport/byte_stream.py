"""The bytes that a connection writes, over whichever transport it has.

The first message of a turn of the loop is written at once, those after it together at
its end.  What the connection has asked of its transport (marks, a pause of reading) is
asked of the next one too.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from asyncrpc.core.loop.spin import Spinner
from asyncrpc.core.transport.abc import PeerCredentials, StreamHandler, Transport
from asyncrpc.core.transport.flow import WaterMarks

# Up to here joining costs less than the kernel takes for that many separate buffers.
JOIN_BYTES_MAX: Final = 64 << 10

Parts = Sequence[bytes | memoryview]


def nobody_waits() -> None:
    """Do nothing: what the peer takes makes no difference."""


def discard_parts(parts: Parts) -> None:
    """Keep nothing: the connection does not outlive its transport."""


class ByteStream:
    """What one connection writes.

    Attributes:
        opening: goes with the next bytes that are not counted.
        transport: takes the bytes; None before there is one, and after the end.
        keep: takes the parts of every write, in case they must be sent again.
        room: set while the transport has room; also after the end.
        on_taken: called when the peer has taken something.
        on_kept: called now and then while much is kept for it.
        awaited: calls that have not been answered; not empty: polling goes on.
    """

    __slots__ = (
        "_ahead",
        "_held_until_s",
        "_hold_timer",
        "_is_ahead_due",
        "_is_reading_paused",
        "_loop",
        "_marks",
        "_poller",
        "_turn",
        "awaited",
        "keep",
        "on_kept",
        "on_taken",
        "opening",
        "room",
        "transport",
    )

    def __init__(
        self, loop: asyncio.AbstractEventLoop, poller: Spinner | None = None
    ) -> None:
        self.transport: Transport | None = None
        self.opening = b""
        self.keep: Callable[[Parts], None] = discard_parts
        self.room = asyncio.Event()
        self.room.set()
        self.on_taken: Callable[[], None] = nobody_waits
        self.on_kept: Callable[[], None] = nobody_waits
        self.awaited: Mapping[int, object] = {}
        self._loop = loop
        self._poller = poller
        self._turn: list[bytes | memoryview] | None = None  # written later this turn
        self._ahead: list[bytes] = []  # goes with the next message
        self._is_ahead_due = False  # in the loop's next turn, if no message comes
        self._held_until_s = math.inf  # or at this time of the loop's
        self._hold_timer: asyncio.Handle | None = None
        self._marks: WaterMarks | None = None
        self._is_reading_paused = False

    def on_full(self) -> None:
        """The transport has no room for more."""
        self.room.clear()
        self.on_kept()

    def on_less(self) -> None:
        """Less waits to be written: whoever waits for that looks in the next turn."""
        self._loop.call_soon(lambda: self.on_taken())  # noqa: PLW0108  (who it is changes)

    # --- writing ---------------------------------------------------------------------

    def write(self, parts: Parts) -> None:
        """Write the first message of a loop turn at once, and join those after it.

        One alone loses no time; of many, all but the first cost one system call.
        """
        if self._turn is not None:
            self._turn += parts
        elif self.transport is not None:
            self._turn = []
            self._loop.call_soon(self._end_turn)
            if self._ahead:
                parts = (*self._take_ahead(), *parts)
            self.keep(parts)
            self.transport.send(parts)

    def write_now(self, *parts: bytes | memoryview) -> None:
        """Write parts of frames now, after what this turn of the loop has joined."""
        self.flush()
        if self.transport is not None:
            self.keep(parts)
            self.transport.send(parts)

    def write_apart(self, message: bytes) -> None:
        """Write a message after which the loop does not poll, such as a sign of life.

        Polling for what follows it would keep an idle worker awake.
        """
        if self._turn is not None:
            self._turn.append(message)
        elif self.transport is not None:
            self.write_now(*self._take_ahead(), message)

    def write_uncounted(self, *parts: bytes) -> None:
        """Write bytes that belong to the transport: they are never sent again."""
        if self.opening:
            parts, self.opening = (self.opening, *parts), b""
        if any(parts) and self.transport is not None:
            self.transport.send(parts)

    def join(self, part: bytes) -> None:
        """Write a message that can wait: with the next one, or in the loop's next turn.

        It is written before every message that is sent later.
        """
        if self._turn is not None:
            self._turn.append(part)
            return
        if not self._is_ahead_due:
            self._is_ahead_due = True
            self._loop.call_soon(self.write_ahead)
        self._ahead.append(part)

    def hold(self, part: bytes, for_s: float | None = None) -> None:
        """Write a message with the next one, whenever that comes.

        It is written before every message that is sent later.

        Args:
            for_s: seconds after which it is written anyway; None: when `write_ahead` is
                called.
        """
        if self._turn is not None:
            self._turn.append(part)
            return
        self._ahead.append(part)
        if for_s is None:
            return
        until_s = self._loop.time() + for_s
        if until_s < self._held_until_s:
            self._hold_no_longer()
            self._held_until_s = until_s
            # What is due at once has no `when()` on uvloop: the time is kept apart.
            self._hold_timer = self._loop.call_at(until_s, self._write_held)

    def _hold_no_longer(self) -> None:
        if self._hold_timer is not None:
            self._hold_timer.cancel()
            self._hold_timer, self._held_until_s = None, math.inf

    def _write_held(self) -> None:
        self._hold_no_longer()
        self.write_ahead()

    def _take_ahead(self) -> list[bytes]:
        """Return the messages that wait for the next one, and stop their timer."""
        ahead, self._ahead = self._ahead, []
        self._hold_no_longer()
        return ahead

    @property
    def has_ahead(self) -> bool:
        """Return whether a message waits for the next one."""
        return bool(self._ahead)

    def write_ahead(self) -> None:
        """Write the messages that wait for another one."""
        self._is_ahead_due = False
        if self._ahead:
            self.write(())

    def flush(self) -> None:
        """Write what this turn has joined."""
        if self._turn and self.transport is not None:
            parts = _joined(self._turn)
            self._turn = []
            self.keep(parts)
            self.transport.send(parts)

    def _end_turn(self) -> None:
        self.flush()
        self._turn = None
        if self._poller is not None:
            self._poller.wait(is_for_answer=bool(self.awaited))

    # --- the transport ---------------------------------------------------------------

    @property
    def queued_bytes(self) -> int:
        """Return how many bytes wait in the transport."""
        return 0 if self.transport is None else self.transport.queued_bytes

    @property
    def where(self) -> str:
        """The other end, for people to read."""
        return self.transport.remote if self.transport is not None else "nowhere"

    @property
    def has_begun(self) -> bool:
        """Return whether the peer has begun a handshake of the transport's own."""
        return self.transport is not None and self.transport.has_begun

    @property
    def scheme(self) -> str:
        """Return the transport's scheme; empty without a transport."""
        return self.transport.scheme if self.transport is not None else ""

    @property
    def credentials(self) -> PeerCredentials | None:
        """Return the process at the other end, if the kernel vouches for it."""
        return self.transport.credentials if self.transport is not None else None

    def use_marks(self, marks: WaterMarks) -> None:
        """Use other water marks for the transport, and for each that follows it."""
        self._marks = marks
        if self.transport is not None:
            self.transport.use_marks(marks)

    def pause_reading(self) -> None:
        """Stop reading for now."""
        self._is_reading_paused = True
        if self.transport is not None:
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        """Go on reading."""
        self._is_reading_paused = False
        if self.transport is not None:
            self.transport.resume_reading()

    def go_on(self, transport: Transport, handler: StreamHandler, first: Parts) -> None:
        """Use another transport.

        Args:
            first: sent before all else; it is not kept for resending.
        """
        self.transport = transport
        transport.set_handler(handler)
        self.room.set()
        if self._marks is not None:
            transport.use_marks(self._marks)
        if self._is_reading_paused:
            transport.pause_reading()
        if first:
            transport.send(first)

    def take_transport(self) -> Transport | None:
        """Return the transport, and forget it."""
        transport, self.transport = self.transport, None
        return transport

    def close(self) -> None:
        """End in order, after what has been written."""
        if self.transport is not None:
            self.transport.close()

    def abort(self) -> None:
        """End now."""
        if self.transport is not None:
            self.transport.abort()


def _joined(parts: list[bytes | memoryview]) -> Parts:
    """Return parts as few buffers: short ones are joined, long ones left alone."""
    if sum(map(len, parts)) <= JOIN_BYTES_MAX:
        return (b"".join(parts),)
    return parts
