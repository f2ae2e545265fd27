"""Whether payloads leave over lanes, and how much a turn of the loop moves.

Sans-IO.
"""

from __future__ import annotations

import enum
from typing import Final

from asyncrpc.core.state_table import StateTable

# The bytes that one turn of the loop reads from all lanes of a link, and those that it
# writes to them, while small messages come and go: about 30 us each at 4 GB/s.
TURN_BYTES: Final = 128 << 10
# The same while fewer than one message comes in `QUIET_TURNS` turns: messages that open
# payloads and answer them are so rare.  TCP moves 4.3 GB/s then, not 2.3.
QUIET_TURN_BYTES: Final = 512 << 10
QUIET_TURNS: Final = 16


class LanesState(enum.Enum):
    """Whether payloads can leave over lanes."""

    NONE = "no payload has needed a lane yet"
    OPENING = "the first lane is being opened, and payloads wait for it"
    LATE = "the first lane is still being opened: payloads take the control connection"
    UP = "at least one lane is open"
    OFF = "no lane can be opened: payloads take the control connection"
    CLOSED = "the link has ended"


class LanesEvent(enum.Enum):
    """An event that decides whether payloads can leave over lanes."""

    WANT = "a payload needs lanes, or the peer asks for them"
    WAITED = "payloads have waited for `OPENING_WAIT_S`"
    OPENED = "a lane has been opened"
    FAILED = "no lane can be opened"
    LOST = "the last lane has ended"
    CLOSE = "the control connection has ended"


NONE, OPENING, LATE, UP, OFF, CLOSED = LanesState
_E = LanesEvent

TRANSITIONS: Final = StateTable(
    "the lanes of a connection",
    {
        NONE: {_E.WANT: OPENING, _E.OPENED: UP, _E.FAILED: OFF, _E.CLOSE: CLOSED},
        OPENING: {_E.WAITED: LATE, _E.OPENED: UP, _E.FAILED: OFF, _E.CLOSE: CLOSED},
        LATE: {_E.OPENED: UP, _E.FAILED: OFF, _E.CLOSE: CLOSED},
        UP: {_E.LOST: OFF, _E.CLOSE: CLOSED},
        OFF: {_E.OPENED: UP, _E.CLOSE: CLOSED},
        CLOSED: {},
    },
    late=LanesEvent,
)


class TurnRation:
    """The number of bytes that one turn of the loop may move over the lanes of a link.

    A copy of a chunk blocks the loop, so the number is smaller while small messages
    come.  A read of the control connection may have brought one, unless it brought an
    ACK of a lane, of which a large payload causes many.

    Attributes:
        limit_bytes: bytes that the present turn may move in each direction.
    """

    __slots__ = ("_acks", "_last_ack", "_messages", "_turns", "limit_bytes")

    def __init__(self) -> None:
        self.limit_bytes = QUIET_TURN_BYTES
        self._messages = 0  # reads that may have brought some, when last looked at
        self._turns = QUIET_TURNS  # since the last of them
        self._acks = 0  # reads that brought ACKs
        self._last_ack = 0  # number of the last of them

    def next_turn(self, reads: int) -> int:
        """Return how many bytes the next turn may move; per turn and direction."""
        messages = reads - self._acks
        if messages == self._messages:
            self._turns += 1
            if self._turns >= QUIET_TURNS:
                self.limit_bytes = QUIET_TURN_BYTES
        else:
            if self._turns < QUIET_TURNS:
                self.limit_bytes = TURN_BYTES
            self._messages, self._turns = messages, 0
        return self.limit_bytes

    def on_ack(self, reads: int) -> None:
        """Record that the last of so many reads has brought an ACK of a lane."""
        if reads != self._last_ack:
            self._last_ack = reads
            self._acks += 1
