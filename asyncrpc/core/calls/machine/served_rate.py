"""After how long a worker should have room again, by how many calls it has served.

It is asked only when a call is refused, so that all others cost nothing: the rate is
the number of calls that ended between two refusals, over the time that passed.  A mark
is at least a second old, if there has been a refusal for so long; marks from before a
quiet time tell nothing.

Source: J. Little, "A Proof for the Queuing Formula L = λW", 1961: the calls that are
here have ended after the time that it takes, at this rate, to serve as many.
"""

from __future__ import annotations

from typing import Final, NamedTuple

WINDOW_S: Final = 1.0
QUIET_S: Final = 10.0
RETRY_AFTER_S: Final = 1.0  # while nothing is known, or nothing ends
RETRY_AFTER_MAX_S: Final = 60.0


class _Mark(NamedTuple):
    at_s: float
    served: int


class ServedRate:
    """The rate at which calls have ended lately."""

    __slots__ = ("_asked_s", "_new", "_old")

    def __init__(self) -> None:
        self._old: _Mark | None = None
        self._new: _Mark | None = None
        self._asked_s = 0.0

    def retry_after_s(self, served: int, active: int, now_s: float) -> float:
        """Return after how long there should be room."""
        if self._new is None or now_s - self._asked_s > QUIET_S:
            self._old = None
            self._new = _Mark(now_s, served)
        elif now_s - self._new.at_s >= WINDOW_S:
            self._old, self._new = self._new, _Mark(now_s, served)
        self._asked_s = now_s
        mark = self._new if self._old is None else self._old
        ended, took_s = served - mark.served, now_s - mark.at_s
        if ended <= 0 or took_s <= 0:
            return RETRY_AFTER_S
        return min(active * took_s / ended, RETRY_AFTER_MAX_S)
