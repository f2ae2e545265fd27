"""Which connection to a peer is kept: it is dialed on demand, from either side, once.

Two workers that need each other at the same moment both dial.  One connection must
survive, and both must agree which without asking: it is the one dialed by the worker
with the smaller incarnation.  The acceptor of the other one answers it with a refusal
(`DUPLICATE`); its dialer then waits for the first.

If that does not come, it dials again (`attempt` > 0), and is let through: the peer's
own dial may be lost in a network that can be crossed in one direction only.

An offer to a side whose own dial is open may have crossed with that, or may come from a
peer that has lost the connection.  If it may have crossed, it is refused once; the next
one is taken, for a peer that has the connection does not repeat its dial.

A side that takes a connection does not know yet whether its dialer will: the dialer may
hold another one by then, or have given up waiting.  So nothing is sent on it before the
dialer has sent something, which it does as soon as the connection is open for it.  A
connection that has been open at both ends is never given up for another.

Sans-IO; `C` is the service's connection, never looked into.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from asyncrpc.core.state_table import StateTable

C = TypeVar("C")

DUPLICATE = "duplicate"  # the acceptor's verdict on the connection that loses


class PeerState(enum.Enum):
    """What this worker has towards one peer."""

    IDLE = "no connection"
    DIALING = "this worker dials the peer"
    TAKEN = "this worker took a dial of the peer, over which nothing has come yet"
    OPEN = "the connection is open"


class PeerEvent(enum.Enum):
    """What happens to the connection to a peer."""

    WANT = "a call needs a connection"
    DIAL_FAILED = "the dial of this worker ended without a connection"
    DIALED = "the peer took the dial of this worker: both ends are open"
    ACCEPTED = "this worker took a dial of the peer"
    PROVEN = "a message has come over the connection"
    LOST = "the connection has ended"


IDLE, DIALING, TAKEN, OPEN = PeerState
_E = PeerEvent

TRANSITIONS: Final = StateTable(
    "the connections to a peer",
    {
        IDLE: {_E.WANT: DIALING, _E.DIALED: OPEN, _E.ACCEPTED: TAKEN},
        DIALING: {_E.DIAL_FAILED: IDLE, _E.DIALED: OPEN, _E.ACCEPTED: TAKEN},
        # One that is taken or open gives way to another that survives it.
        TAKEN: {_E.PROVEN: OPEN, _E.DIALED: OPEN, _E.ACCEPTED: TAKEN, _E.LOST: IDLE},
        OPEN: {_E.DIALED: OPEN, _E.ACCEPTED: TAKEN, _E.LOST: IDLE},
    },
    late=PeerEvent,
)


@dataclass(frozen=True, slots=True)
class DialVerdict(Generic[C]):
    """What to do with a connection that a peer dialed.

    Attributes:
        replaced: the connection that it replaces, which must be aborted.
    """

    accept: bool
    replaced: C | None = None


class PeerConnection(Generic[C]):
    """The connection to one peer, or the lack of it."""

    __slots__ = (
        "_attempt",
        "_dialed",
        "_refused",
        "connection",
        "own_incarnation",
        "state",
    )

    def __init__(self, own_incarnation: int) -> None:
        self.own_incarnation = own_incarnation
        self.state = PeerState.IDLE
        self.connection: C | None = None
        self._attempt = 0  # of our last dial
        self._dialed = False  # whether the open connection is one of ours
        self._refused = False  # whether an offer was refused while it was open

    def want(self, attempt: int = 0) -> bool:
        """Ask for a connection; return whether to start a dial."""
        if not self._on(PeerEvent.WANT):
            return False
        self._attempt = attempt
        return True

    def on_offer(self, peer_incarnation: int, attempt: int) -> DialVerdict[C]:
        """Decide on a connection that the peer dialed; `on_open` must follow."""
        is_smaller = self.own_incarnation < peer_incarnation
        if self.state is PeerState.DIALING:
            return DialVerdict(accept=attempt > 0 or not is_smaller)
        may_have_crossed = self._dialed and (self._attempt > 0 or is_smaller)
        if self.connection is not None and may_have_crossed and not self._refused:
            self._refused = True
            return DialVerdict(accept=False)
        return DialVerdict(accept=True, replaced=self.connection)

    def on_answer(self, peer_incarnation: int) -> DialVerdict[C]:
        """Decide on a connection that we dialed and the peer took.

        One of the peer's may be open meanwhile, if one of the two has been lost at its
        other end.  Neither side can know which, so both ends keep the same one.
        """
        is_smaller = self.own_incarnation < peer_incarnation
        if self.connection is None or is_smaller:
            return DialVerdict(accept=True, replaced=self.connection)
        return DialVerdict(accept=False)

    def on_open(self, connection: C, *, dialed: bool) -> None:
        """Record the connection that survived.

        Args:
            dialed: whether we dialed it, so that it is open at both ends; if the peer
                dialed it, that is known after `on_proven`.
        """
        self._on(PeerEvent.DIALED if dialed else PeerEvent.ACCEPTED)
        self.connection = connection
        self._dialed = dialed
        self._refused = False

    def on_proven(self, connection: C) -> bool:
        """Something has come over a connection; return whether it may be used now."""
        return connection is self.connection and self._on(PeerEvent.PROVEN)

    def on_dial_failed(self) -> None:
        """A dial of ours ended without a connection."""
        self._on(PeerEvent.DIAL_FAILED)

    def on_lost(self, connection: C) -> bool:
        """A connection has ended; return whether it was the one in use."""
        if connection is not self.connection:
            return False
        self.connection = None
        self._on(PeerEvent.LOST)
        return True

    def _on(self, event: PeerEvent) -> bool:
        """Take an event; return whether it can happen now."""
        before, self.state = self.state, TRANSITIONS.after(self.state, event)
        return event in TRANSITIONS[before]
