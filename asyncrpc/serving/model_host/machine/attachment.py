"""How one web worker comes to the model process, and comes back to it after its loss.

    SEEKING -> STARTING -> LOADING -> READY
       ^          |           |         |   the process was lost, or made no model
       +-- RESTING or TRIPPED <---------+
       +-- LEAVING: it ends in order    +   wait for its end, then seek

All web workers of a host decide alike and for themselves; a lock on a file says which
of them starts the process.  After a loss each rests: 0.1 s, twice as long after each
further one.  After `FAILURES_MAX` in a row it is tripped: calls fail at once, and one
more start is tried every `REST_MAX_S`.  A process that stays ready for `STEADY_S` ends
the row.

Sans-IO: the service does what the state says, and reports what has happened.

Source: the rest is a truncated exponential backoff; tripping is the circuit breaker of
M. Nygard, "Release It!", 2007.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final

REST_S: Final = 0.1  # after the first loss; a start takes seconds anyway
REST_MAX_S: Final = 30.0
FAILURES_MAX: Final = 5  # in a row: then it is no accident
STEADY_S: Final = 60.0


class AttachmentState(enum.Enum):
    """What is to be done now."""

    SEEKING = "find out whether a model process runs; start one if none does"
    STARTING = "wait until the process listens"
    LOADING = "wait for the model"
    READY = "nothing: calls may be made"
    LEAVING = "wait for the end of a process that ends in order"
    RESTING = "wait a moment, then seek again"
    TRIPPED = "fail calls at once; seek again after a while"
    CLOSED = "nothing: the web worker has left"


class AttachmentEvent(enum.Enum):
    """What has happened."""

    FOUND = "a process runs or has been started"
    FOUND_ENDING = "a process runs that is ending, or gives way to another"
    ATTACHED = "the process has taken the web worker in"
    LOADED = "the model can be called"
    ENDING = "the process has said that it ends or has older code"
    GONE = "the process that ends has ended, or another one has its place"
    LOST = "the process was lost, or could not make its model"
    LOST_AGAIN = "the same, once too often"
    RESTED = "the time to rest is over"
    CLOSED = "the web worker leaves"


_S, _E = AttachmentState, AttachmentEvent

TRANSITIONS: Final[
    Mapping[AttachmentState, Mapping[AttachmentEvent, AttachmentState]]
] = {
    _S.SEEKING: {
        _E.FOUND: _S.STARTING,
        _E.FOUND_ENDING: _S.LEAVING,
        _E.LOST: _S.RESTING,
        _E.LOST_AGAIN: _S.TRIPPED,
        _E.CLOSED: _S.CLOSED,
    },
    _S.STARTING: {
        _E.ATTACHED: _S.LOADING,
        _E.ENDING: _S.LEAVING,
        _E.LOST: _S.RESTING,
        _E.LOST_AGAIN: _S.TRIPPED,
        _E.CLOSED: _S.CLOSED,
    },
    _S.LOADING: {
        _E.LOADED: _S.READY,
        _E.ENDING: _S.LEAVING,
        _E.LOST: _S.RESTING,
        _E.LOST_AGAIN: _S.TRIPPED,
        _E.CLOSED: _S.CLOSED,
    },
    _S.READY: {
        _E.ENDING: _S.LEAVING,
        _E.LOST: _S.RESTING,
        _E.LOST_AGAIN: _S.TRIPPED,
        _E.CLOSED: _S.CLOSED,
    },
    _S.LEAVING: {_E.GONE: _S.SEEKING, _E.CLOSED: _S.CLOSED},
    _S.RESTING: {_E.RESTED: _S.SEEKING, _E.CLOSED: _S.CLOSED},
    _S.TRIPPED: {_E.RESTED: _S.SEEKING, _E.CLOSED: _S.CLOSED},
    _S.CLOSED: {},
}


class Attachment:
    """One web worker's way to the model process.

    Attributes:
        state: what is to be done now.
        failures: losses in a row.
        losses: losses since the beginning.
        problem: how the process was last lost; empty: it never was.
        wakes_at_s: when the rest is over; None: it does not rest.
    """

    __slots__ = ("_ready_s", "failures", "losses", "problem", "state", "wakes_at_s")

    def __init__(self) -> None:
        """Begin to seek."""
        self.state = AttachmentState.SEEKING
        self.failures = 0
        self.losses = 0
        self.problem = ""
        self.wakes_at_s: float | None = None
        self._ready_s: float | None = None

    def advance(self, event: AttachmentEvent) -> None:
        """Go to the next state; an event that is not listed changes nothing."""
        self.state = TRANSITIONS[self.state].get(event, self.state)

    def load(self, now_s: float) -> None:
        """Take note that the model can be called."""
        if self.state is AttachmentState.LOADING:
            self._ready_s = now_s
        self.advance(AttachmentEvent.LOADED)

    def lose(self, now_s: float, problem: str) -> None:
        """Take note that the process was lost, or could not make its model.

        Args:
            now_s: the time.
            problem: how; for the errors of calls.
        """
        if AttachmentEvent.LOST not in TRANSITIONS[self.state]:
            return
        ready_s, self._ready_s = self._ready_s, None
        if ready_s is not None and now_s - ready_s >= STEADY_S:
            self.failures = 0
        self.failures += 1
        self.losses += 1
        self.problem = problem
        is_too_often = self.failures > FAILURES_MAX
        rest_s = min(REST_S * 2.0 ** (self.failures - 1), REST_MAX_S)
        self.wakes_at_s = now_s + (REST_MAX_S if is_too_often else rest_s)
        self.advance(
            AttachmentEvent.LOST_AGAIN if is_too_often else AttachmentEvent.LOST
        )

    def rest(self, now_s: float) -> float:
        """Return the seconds that are left to rest; once there are none, seek again."""
        left_s = 0.0 if self.wakes_at_s is None else self.wakes_at_s - now_s
        if left_s <= 0:
            self.wakes_at_s = None
            self.advance(AttachmentEvent.RESTED)
        return max(left_s, 0.0)
