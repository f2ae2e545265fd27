"""How fast work is done, by what has ended lately.

Work is done in turns (a batch, a sequence, a handler), several at a time in as many
places.  The length of a turn and the requests in one are means that forget: each new
turn counts for an eighth, the first ones as much as each other.

Source: RFC 6298, section 2 (the weight of 1/8 for a smoothed time); J. Little, "A Proof
for the Queuing Formula L = λW", 1961.
"""

from __future__ import annotations

import math
from typing import Final

WEIGHT: Final = 1 / 8
TURNS_MIN: Final = 3  # before so many have ended nothing is foretold
RETRY_AFTER_UNKNOWN_S: Final = 1.0
RETRY_AFTER_MAX_S: Final = 60.0


class ServiceRate:
    """The rate at which turns end.

    Attributes:
        ended: number of turns that have.
        turn_s: mean length of a turn; 0 before the first.
        requests: mean number of requests in one.
    """

    __slots__ = ("_places", "_running", "ended", "requests", "turn_s")

    def __init__(self, places: int) -> None:
        """Know nothing yet.

        Args:
            places: number of turns that may run at the same time.
        """
        self._places = places
        self._running: dict[object, float] = {}  # when each began, in this order
        self.ended = 0
        self.turn_s = 0.0
        self.requests = 1.0

    @property
    def running(self) -> int:
        """How many turns run."""
        return len(self._running)

    @property
    def has_place(self) -> bool:
        """Return whether one more turn may run."""
        return len(self._running) < self._places

    def begin(self, turn: object, now_s: float) -> None:
        """A turn begins."""
        self._running[turn] = now_s

    def end(self, turn: object, requests: int, now_s: float) -> None:
        """A turn has ended that is typical: it counts."""
        took_s = now_s - self._running.pop(turn)
        self.ended += 1
        weight = max(WEIGHT, 1 / self.ended)
        self.turn_s += (took_s - self.turn_s) * weight
        self.requests += (requests - self.requests) * weight

    def drop(self, turn: object) -> None:
        """A turn has ended that tells nothing, if it has not ended before.

        It was cancelled, say, or has failed.
        """
        self._running.pop(turn, None)

    @property
    def is_known(self) -> bool:
        """Return whether enough turns have ended to foretell others."""
        return self.ended >= TURNS_MIN

    def wait_s(self, turns_before: int, now_s: float) -> float:
        """Return how long one will wait that has so many turns before it; at least.

        0 as long as too little is known.
        """
        if not self.is_known:
            return 0.0
        first_s = 0.0
        if not self.has_place:
            oldest_s = next(iter(self._running.values()))
            first_s = max(0.0, oldest_s + self.turn_s - now_s)
        return first_s + turns_before * self.turn_s / self._places

    def drain_s(self, waiting: int, now_s: float) -> float:
        """Return after how long there should be room: all that wait have begun."""
        if not self.is_known:
            return RETRY_AFTER_UNKNOWN_S
        turns = math.ceil((waiting + 1) / self.requests)
        return min(self.wait_s(turns, now_s), RETRY_AFTER_MAX_S)

    def per_s(self) -> float:
        """Return how many requests a second are done if all places are taken."""
        return self.requests * self._places / self.turn_s if self.turn_s else 0.0
