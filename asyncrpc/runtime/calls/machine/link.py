"""The life of a link: whether calls go both ways, one way, or no more.

    state      event      then
    OPEN       GOODBYE    DRAINING    the peer takes no further calls
    OPEN       LOST       LOST        the connection has ended for good
    DRAINING   LOST       LOST

Nothing leads back: a worker that drains ends, and a connection that comes later has a
link of its own.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final


class LinkState(enum.Enum):
    """How far the life of a link has come."""

    OPEN = "calls go both ways"
    DRAINING = "the peer takes no further calls"
    LOST = "the connection has ended"


class LinkEvent(enum.Enum):
    """Events that change the state of a link."""

    GOODBYE = "the peer shuts down"
    LOST = "the connection has ended for good"


OPEN, DRAINING, LOST = LinkState

TRANSITIONS: Final[Mapping[LinkState, Mapping[LinkEvent, LinkState]]] = {
    OPEN: {LinkEvent.GOODBYE: DRAINING, LinkEvent.LOST: LOST},
    DRAINING: {LinkEvent.GOODBYE: DRAINING, LinkEvent.LOST: LOST},
    LOST: {LinkEvent.GOODBYE: LOST, LinkEvent.LOST: LOST},
}


class LinkStatus:
    """The state of one link, and why it was lost.

    Attributes:
        state: how far its life has come.
        lost_because: why the connection has ended; empty unless it has.
    """

    __slots__ = ("lost_because", "state")

    def __init__(self) -> None:
        self.state = LinkState.OPEN
        self.lost_because = ""

    @property
    def is_lost(self) -> bool:
        """Return whether the connection has ended."""
        return self.state is LinkState.LOST

    def on_goodbye(self) -> None:
        """Record that the peer shuts down, and takes no further calls."""
        self.state = TRANSITIONS[self.state][LinkEvent.GOODBYE]

    def on_lost(self, reason: str) -> None:
        """Record that the connection has ended; the first reason counts."""
        if not self.is_lost:
            self.lost_because = reason or "the connection was closed"
        self.state = TRANSITIONS[self.state][LinkEvent.LOST]
