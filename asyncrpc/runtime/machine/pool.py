"""Which connection to a peer is the one: dialed on demand, from either side, once.

Two workers that need each other at the same moment both dial.  One connection must
survive, and both must agree which without asking: it is the one dialed by the worker
with the smaller incarnation.  The acceptor of the other one answers it with a refusal
(`DUPLICATE`); its dialer then waits for the first.

A dial that repeats an earlier one (`attempt` > 0) is made by a peer that has no
connection: it replaces whatever this side still believes in.

Sans-IO; `C` is the service's connection, never looked into.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Generic, TypeVar

C = TypeVar("C")

DUPLICATE = "duplicate"  # the acceptor's verdict on the connection that loses


class PeerState(enum.Enum):
    """What this worker has towards one peer."""

    IDLE = "no connection"
    DIALING = "a dial of ours is under way"
    OPEN = "connected"


@dataclass(frozen=True, slots=True)
class Verdict(Generic[C]):
    """What to do with a connection that a peer dialed.

    Attributes:
        accept: whether to take it.
        replaced: the connection it takes the place of, which is to be aborted.
    """

    accept: bool
    replaced: C | None = None


class PeerConnection(Generic[C]):
    """The connection to one peer, or the lack of it."""

    __slots__ = ("_dialed", "connection", "own_incarnation", "state")

    def __init__(self, own_incarnation: int) -> None:
        self.own_incarnation = own_incarnation
        self.state = PeerState.IDLE
        self.connection: C | None = None
        self._dialed = False  # whether the open connection is one of ours

    def want(self) -> bool:
        """Ask for a connection; return whether a dial is to be started."""
        if self.state is not PeerState.IDLE:
            return False
        self.state = PeerState.DIALING
        return True

    def on_offer(self, peer_incarnation: int, attempt: int) -> Verdict[C]:
        """Decide on a connection that the peer dialed; nothing changes yet."""
        if self.state is PeerState.IDLE or attempt:
            return Verdict(accept=True, replaced=self.connection)
        ours_wins = self.own_incarnation < peer_incarnation
        if self.state is PeerState.DIALING:
            return Verdict(accept=not ours_wins)
        if self._dialed and ours_wins:
            return Verdict(accept=False)
        return Verdict(accept=True, replaced=self.connection)

    def on_open(self, connection: C, *, dialed: bool) -> None:
        """Take note of the connection that survived."""
        self.state = PeerState.OPEN
        self.connection = connection
        self._dialed = dialed

    def on_dial_failed(self) -> None:
        """A dial of ours ended without a connection."""
        if self.state is PeerState.DIALING:
            self.state = PeerState.IDLE

    def on_lost(self, connection: C) -> bool:
        """A connection has ended; return whether it was the one."""
        if connection is not self.connection:
            return False
        self.connection = None
        self.state = PeerState.IDLE
        return True
