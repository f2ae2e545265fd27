"""Whether payloads leave over lanes, and how much a turn of the loop moves.

Sans-IO.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final

# The bytes that one turn of the loop reads from all lanes of a link, and those that it
# writes to them, while small messages come and go: about 30 us each at 4 GB/s.
TURN_BYTES: Final = 128 << 10
# The same once the control connection has had nothing to read for `QUIET_TURNS` turns:
# then no small message waits, and TCP moves 4.3 GB/s, not 2.3.
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

# An event that is not listed changes nothing.
TRANSITIONS: Final[Mapping[LanesState, Mapping[LanesEvent, LanesState]]] = {
    NONE: {_E.WANT: OPENING, _E.OPENED: UP, _E.FAILED: OFF, _E.CLOSE: CLOSED},
    OPENING: {_E.WAITED: LATE, _E.OPENED: UP, _E.FAILED: OFF, _E.CLOSE: CLOSED},
    LATE: {_E.OPENED: UP, _E.FAILED: OFF, _E.CLOSE: CLOSED},
    UP: {_E.LOST: OFF, _E.CLOSE: CLOSED},
    OFF: {_E.OPENED: UP, _E.CLOSE: CLOSED},
    CLOSED: {},
}


class TurnRation:
    """The number of bytes that one turn of the loop may move over the lanes of a link.

    A copy of a chunk blocks the loop, so the number is smaller while small messages
    come.

    Attributes:
        limit_bytes: bytes that the present turn may move in each direction.
    """

    __slots__ = ("_quiet_turns", "_reads", "limit_bytes")

    def __init__(self) -> None:
        self.limit_bytes = TURN_BYTES
        self._reads = 0  # of the control connection, when last looked at
        self._quiet_turns = 0  # since then

    def next_turn(self, reads: int) -> int:
        """Return how many bytes the next turn may move; per turn and direction.

        Args:
            reads: number of reads of the control connection so far.
        """
        self._quiet_turns = 0 if reads != self._reads else self._quiet_turns + 1
        self._reads = reads
        quiet = self._quiet_turns >= QUIET_TURNS
        self.limit_bytes = QUIET_TURN_BYTES if quiet else TURN_BYTES
        return self.limit_bytes
