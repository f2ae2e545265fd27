"""How fast work is done, measured by the turns that have ended recently.

Work is done in turns (a batch, a sequence, a handler), several at a time in as many
places.  The length of a turn and its number of requests are moving means: each new turn
counts for an eighth; the first turns count equally.

Source: RFC 6298, section 2 (the weight of 1/8 for a smoothed time); J. Little, "A Proof
for the Queuing Formula L = λW", 1961.
"""

from __future__ import annotations

import math
from typing import Final

WEIGHT: Final = 1 / 8
TURNS_MIN: Final = 3  # turns that must have ended before there is a forecast
RETRY_AFTER_UNKNOWN_S: Final = 1.0
RETRY_AFTER_MAX_S: Final = 60.0


class ServiceRate:
    """The rate at which turns end.

    Attributes:
        turn_s: mean length of a turn; 0 before the first.
        requests: mean number of requests in one.
    """

    __slots__ = ("_places", "_running", "ended", "requests", "turn_s")

    def __init__(self, places: int) -> None:
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
        """Note that a turn begins."""
        self._running[turn] = now_s

    def end(self, turn: object, requests: int, now_s: float) -> None:
        """Note the end of a typical turn: it counts for the means."""
        took_s = now_s - self._running.pop(turn)
        self.ended += 1
        weight = max(WEIGHT, 1 / self.ended)
        self.turn_s += (took_s - self.turn_s) * weight
        self.requests += (requests - self.requests) * weight

    def drop(self, turn: object) -> None:
        """Note the end of a turn that does not count, such as a cancelled one.

        Does nothing if the turn has already ended.
        """
        self._running.pop(turn, None)

    @property
    def is_known(self) -> bool:
        """Return whether enough turns have ended for a forecast."""
        return self.ended >= TURNS_MIN

    def wait_s(self, turns_before: int, now_s: float) -> float:
        """Return how long a turn will at least wait with so many turns before it.

        Returns 0 before there is a forecast.
        """
        if not self.is_known:
            return 0.0
        first_s = 0.0
        if not self.has_place:
            oldest_s = next(iter(self._running.values()))
            first_s = max(0.0, oldest_s + self.turn_s - now_s)
        return first_s + turns_before * self.turn_s / self._places

    def drain_s(self, waiting: int, now_s: float) -> float:
        """Return the seconds until all waiting requests should have begun."""
        if not self.is_known:
            return RETRY_AFTER_UNKNOWN_S
        turns = math.ceil((waiting + 1) / self.requests)
        # Turns may have been too short for the clock: 0 would mean "at once".
        wait_s = self.wait_s(turns, now_s) or RETRY_AFTER_UNKNOWN_S
        return min(wait_s, RETRY_AFTER_MAX_S)

    def per_s(self) -> float:
        """Return how many requests per second are served if all places are taken."""
        return self.requests * self._places / self.turn_s if self.turn_s else 0.0
