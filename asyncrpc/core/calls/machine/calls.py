"""The calls of one connection, in both directions: waiting calls, and served ones.

`PendingCalls` is the caller's side, `ServedCalls` the callee's.  Both are generic over
the record that the service keeps for a call: here it is never looked into.

`LinkStatus` is the life of their link: whether calls go both ways, one way, or no more.

    state      event      then
    OPEN       GOODBYE    DRAINING    the peer takes no further calls
    OPEN       LOST       LOST        the connection has ended for good
    DRAINING   LOST       LOST

Nothing leads back: a worker that drains ends, and a connection that comes later has a
link of its own.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from typing import Final, Generic, TypeVar

from asyncrpc.core.state_table import StateTable
from asyncrpc.errors import MalformedError

R = TypeVar("R")


class PendingCalls(Generic[R]):
    """Calls that have been sent and not answered.

    Attributes:
        get: returns a call by its id; None if it does not wait any more.
        end: removes a call that waits, by its id.
    """

    __slots__ = ("_next_id", "_open", "end", "get")

    def __init__(self) -> None:
        self._next_id = 1
        self._open: dict[int, R] = {}
        # Those of the dictionary itself: asked for in every answer.
        self.get: Callable[[int], R | None] = self._open.get
        self.end: Callable[[int], R] = self._open.pop

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[R]:
        return iter(tuple(self._open.values()))

    @property
    def next_id(self) -> int:
        """The id of the next call."""
        return self._next_id

    @property
    def started(self) -> int:
        """How many calls have ever been sent."""
        return self._next_id - 1

    @property
    def calls(self) -> Mapping[int, R]:
        """Return the waiting calls, by id; always the same object."""
        return self._open

    def open(self, record: R) -> int:
        """Add a call; return its id, which is not used again on this connection."""
        call_id = self._next_id
        self._next_id = call_id + 1
        self._open[call_id] = record
        return call_id

    def take(self, call_id: int) -> R | None:
        """Remove the call and return it; None if it does not wait any more."""
        self.check(call_id)
        return self._open.pop(call_id, None)

    def check(self, call_id: int) -> None:
        """Refuse an answer to a call that was never made."""
        if not 0 < call_id < self._next_id:
            raise MalformedError(
                f"an answer came for call {call_id}, which was never made"
            )

    def take_all(self) -> list[R]:
        """Remove every call: the connection is gone."""
        records = list(self._open.values())
        self._open.clear()
        return records


class ServedCalls(Generic[R]):
    """Calls that a peer has sent and that have not been answered.

    Attributes:
        running: the calls, by id; always the same object.
        get: returns a call by its id; None if it is not running.
        end: forgets a call that runs, by its id: it has been answered, or its caller
            has gone.
    """

    __slots__ = ("end", "get", "running")

    def __init__(self) -> None:
        self.running: dict[int, R] = {}
        # Those of the dictionary itself: asked for in every answer.
        self.get: Callable[[int], R | None] = self.running.get
        self.end: Callable[[int], R] = self.running.pop

    def __len__(self) -> int:
        return len(self.running)

    def __iter__(self) -> Iterator[R]:
        return iter(tuple(self.running.values()))

    def begin(self, call_id: int, record: R) -> None:
        """Add a call."""
        if call_id in self.running:
            raise MalformedError(f"call {call_id} was made twice")
        self.running[call_id] = record


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

TRANSITIONS: Final = StateTable(
    "a link",
    {
        OPEN: {LinkEvent.GOODBYE: DRAINING, LinkEvent.LOST: LOST},
        DRAINING: {LinkEvent.GOODBYE: DRAINING, LinkEvent.LOST: LOST},
        LOST: {LinkEvent.GOODBYE: LOST, LinkEvent.LOST: LOST},
    },
)


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
        self.state = TRANSITIONS.after(self.state, LinkEvent.GOODBYE)

    def on_lost(self, reason: str) -> None:
        """Record that the connection has ended; the first reason counts."""
        if not self.is_lost:
            self.lost_because = reason or "the connection was closed"
        self.state = TRANSITIONS.after(self.state, LinkEvent.LOST)
