"""How many peers a worker dials at a time.

As many as answer soon.  A handshake costs some milliseconds of processor time at each
end: if too many are under way, on this host or at the peers, all take long, and at last
longer than a dial may.  So the window begins small and grows by one with each peer that
has answered quickly: it doubles in the time of one handshake.  With each that was slow
it is halved.

What is quick does not depend on what other dials took: a network whose handshakes take
a second is not the problem here, and a worker of a host that is overloaded from the
start has seen no other.

Sans-IO: the service measures, and begins dials while `may_begin`.
"""

from __future__ import annotations

from typing import Final

WINDOW_MIN: Final = 2
WINDOW_FIRST: Final = 4
WINDOW_MAX: Final = 64
QUICK_S: Final = 0.75  # three times across the earth and back
SLOW_S: Final = 1.5


class DialWindow:
    """The dials under way, and how many there may be.

    Attributes:
        size: how many there may be.
    """

    __slots__ = ("size", "under_way")

    def __init__(self) -> None:
        self.size = WINDOW_FIRST
        self.under_way = 0

    @property
    def may_begin(self) -> bool:
        """Return whether another dial may begin."""
        return self.under_way < self.size

    def on_begun(self) -> None:
        """A dial begins."""
        self.under_way += 1

    def on_answered(self, took_s: float) -> None:
        """A peer has answered, so many seconds after its dial began."""
        if took_s <= QUICK_S:
            self.size = min(self.size + 1, WINDOW_MAX)
        elif took_s > SLOW_S:
            self.size = max(self.size // 2, WINDOW_MIN)

    def on_ended(self) -> None:
        """A dial has ended, or does not count any more."""
        self.under_way -= 1
