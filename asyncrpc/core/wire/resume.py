"""Bytes that were sent and may have to be sent again after a reconnect.

From its HELLO on each side counts the bytes that it reads, and sends the count from
time to time (ACK).  The other side keeps the bytes that have not been acknowledged.  If
the transport breaks, one side dials again; both HELLOs name the resumed connection and
how many bytes of it have been read, and each side goes on sending from there.  So every
byte arrives once and in order, and higher layers do not notice a break: neither frames
nor payloads need numbers, and a cut may be anywhere, also inside a frame.

`ResumeStatus` decides whether the connection outlives its transport; `RetransmitBuffer`
keeps sent bytes, and `Receipts` counts read bytes.

Sans-IO.

Source: RFC 9293 (TCP), whose sequence numbers count bytes too.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from asyncrpc.core.state_table import StateTable
from asyncrpc.errors import MalformedError

# An ACK is due after so many bytes: one for hundreds of small calls.  On a lane, where
# only chunks of 512 KiB travel, less often: an ACK costs both ends 20 us, and each
# payload that is complete causes one.
ACK_BYTES: Final = 32 << 10
LANE_ACK_BYTES: Final = 8 << 20

NEVER: Final = 1 << 64  # no call and no byte has this number


class ResumeState(enum.Enum):
    """Whether a connection outlives its transport."""

    NOT_RESUMABLE = "the connection ends with its transport, unless ALLOW comes before"
    CONNECTED = "another transport may replace the present one"
    BROKEN = "the connection waits for another transport"
    CLOSING = "a side closes the connection, whose transport may still be replaced"
    CLOSING_BROKEN = "a side closes the connection, which waits for another transport"
    ENDING = "the connection ends with its present transport in any case"
    ENDED = "the connection has ended"


class ResumeEvent(enum.Enum):
    """An event that decides whether a connection outlives its transport."""

    ALLOW = "the connection may outlive its transport from now on"
    LOSE = "the transport has ended"
    REPLACE = "the transport is given up for another, which is about to come"
    RESUME = "another transport has come"
    CLOSE = "this side closes or aborts the connection"
    PEER_CLOSE = "a CLOSE of the peer has come"
    END = "the waiters of the connection have been told of its end"


NOT_RESUMABLE, CONNECTED, BROKEN, CLOSING, CLOSING_BROKEN, ENDING, ENDED = ResumeState
_E = ResumeEvent

TRANSITIONS: Final = StateTable(
    "a connection",
    {
        NOT_RESUMABLE: {
            _E.ALLOW: CONNECTED,
            _E.LOSE: ENDED,
            _E.CLOSE: ENDING,
            _E.PEER_CLOSE: ENDING,
            _E.END: ENDED,
        },
        CONNECTED: {
            _E.LOSE: BROKEN,
            _E.REPLACE: BROKEN,
            _E.CLOSE: CLOSING,
            _E.PEER_CLOSE: CLOSING,
            _E.END: ENDED,
        },
        BROKEN: {
            _E.LOSE: ENDED,
            _E.RESUME: CONNECTED,
            _E.CLOSE: ENDING,  # nothing can be written any more
            _E.PEER_CLOSE: ENDED,  # the end has overtaken it: neither side dials
            _E.END: ENDED,
        },
        CLOSING: {
            _E.LOSE: ENDED,
            _E.REPLACE: CLOSING_BROKEN,
            _E.END: ENDED,
        },
        CLOSING_BROKEN: {
            _E.LOSE: ENDED,
            _E.RESUME: CLOSING,
            _E.CLOSE: ENDING,
            _E.PEER_CLOSE: ENDED,
            _E.END: ENDED,
        },
        ENDING: {
            _E.LOSE: ENDED,
            _E.END: ENDED,
        },
        ENDED: {},
    },
    late=ResumeEvent,
)
_BROKEN: Final = frozenset({BROKEN, CLOSING_BROKEN})


class ResumeStatus:
    """Whether one connection outlives its transport.

    Attributes:
        state: the present state.
    """

    __slots__ = ("state",)

    def __init__(self) -> None:
        self.state = NOT_RESUMABLE

    @property
    def is_broken(self) -> bool:
        """Return whether the connection waits for another transport."""
        return self.state in _BROKEN

    def on(self, event: ResumeEvent) -> ResumeState:
        """Take an event; return the new state."""
        self.state = TRANSITIONS.after(self.state, event)
        return self.state


class Receipts:
    """Counts the bytes read from one connection, and those acknowledged to the peer.

    Attributes:
        received: bytes that have been read since the peer's HELLO.
        due_at: the count at which the next ACK is due.
    """

    __slots__ = ("_acknowledged", "_every_bytes", "due_at", "received")

    def __init__(self) -> None:
        self.received = 0
        self.due_at = NEVER
        self._acknowledged = 0
        self._every_bytes = 0  # 0: no ACK is ever due

    def begin(self, every_bytes: int) -> None:
        """Begin; an ACK is due after each `every_bytes`."""
        self._every_bytes = every_bytes
        self.due_at = self.received + every_bytes

    def has_news(self, nbytes: int) -> bool:
        """Return whether at least `nbytes` bytes have not been acknowledged."""
        return self._every_bytes > 0 and self.received - self._acknowledged >= nbytes

    def acknowledge(self) -> int:
        """Record an ACK; return how many bytes have been read."""
        self._acknowledged = self.received
        self.due_at = self.received + self._every_bytes
        return self.received


class RetransmitBuffer:
    """Bytes of one connection that its peer has not acknowledged.

    Attributes:
        add: takes the parts of a write, in order.  It is the deque's own method: it
            runs for every write, and parts are counted only when an ACK comes.
        start: bytes of the parts that have been acknowledged completely.
    """

    __slots__ = ("_acknowledged", "_parts", "add", "start")

    def __init__(self) -> None:
        self._parts: deque[bytes | memoryview] = deque()
        self.add: Callable[[Sequence[bytes | memoryview]], None] = self._parts.extend
        self.start = 0
        self._acknowledged = 0

    @property
    def nbytes(self) -> int:
        """Number of bytes that are kept; counted on each access, so not per write."""
        return sum(map(len, self._parts))

    def acknowledge(self, received: int) -> None:
        """Let go of bytes that the peer has read."""
        if received <= self._acknowledged:
            return
        self._acknowledged = received
        parts, start = self._parts, self.start
        while start < received:
            if not parts:
                raise MalformedError(
                    f"the peer acknowledged {received} bytes, but {start} were sent"
                )
            end = start + len(parts[0])
            if end > received:
                break  # inside a part, which is kept whole
            parts.popleft()
            start = end
        self.start = start

    def rest(self, received: int) -> list[bytes | memoryview]:
        """Return the bytes that the peer has not read."""
        if received < self._acknowledged:
            raise MalformedError(
                f"the peer read {received} bytes before the connection broke, but has "
                f"acknowledged {self._acknowledged}"
            )
        self.acknowledge(received)
        rest = list(self._parts)
        if received > self.start:
            rest[0] = memoryview(rest[0])[received - self.start :]
        return rest

    def clear(self) -> None:
        """Forget all bytes: the connection has ended."""
        self._parts.clear()
