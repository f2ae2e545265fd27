"""Whether payloads leave over lanes, and how much a turn of the loop moves.

Sans-IO.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final

# What one turn of the loop reads from all lanes of a link, and what it writes to them,
# while small messages come and go: about 30 us each at 4 GB/s.
TURN_BYTES: Final = 128 << 10
# The same once the control connection has had nothing to read for so many turns: then
# nobody waits, and TCP moves 4.3 GB/s, not 2.3.
QUIET_TURN_BYTES: Final = 512 << 10
QUIET_TURNS: Final = 16


class LanesState(enum.Enum):
    """Whether payloads can leave over lanes."""

    NONE = "nobody has needed them yet"
    OPENING = "the first is being opened, and payloads wait for it"
    LATE = "the first is still being opened: payloads take the control connection"
    UP = "there is at least one"
    OFF = "there can be none: payloads take the control connection"
    CLOSED = "the link has ended"


class LanesEvent(enum.Enum):
    """What decides it."""

    WANT = "a payload needs them, or the peer asks for them"
    WAITED = "payloads have waited long enough"
    OPENED = "a lane has been opened"
    FAILED = "none can be opened"
    LOST = "the last has ended"
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
    """How much one turn of the loop may move over the lanes of a link.

    While a chunk is copied nothing else happens; so less, while small messages come.

    Attributes:
        limit_bytes: what the turn at hand may move, in each direction.
    """

    __slots__ = ("_quiet_turns", "_reads", "limit_bytes")

    def __init__(self) -> None:
        self.limit_bytes = TURN_BYTES
        self._reads = 0  # of the control connection, when last looked at
        self._quiet_turns = 0  # since then

    def next_turn(self, reads: int) -> int:
        """Return how much the next turn may move; once for each turn and direction.

        Args:
            reads: how often something has been read from the control connection.
        """
        self._quiet_turns = 0 if reads != self._reads else self._quiet_turns + 1
        self._reads = reads
        quiet = self._quiet_turns >= QUIET_TURNS
        self.limit_bytes = QUIET_TURN_BYTES if quiet else TURN_BYTES
        return self.limit_bytes
