"""How one web worker attaches to the model process, and attaches again after its loss.

    SEEKING -> STARTING -> LOADING -> READY
       ^          |           |         |   the process was lost, or made no model
       +-- RESTING or TRIPPED <---------+
       +-- LEAVING: it is shutting down +   wait for its end, then seek

Each web worker of a host decides by itself, in the same way; a lock on a file decides
which of them starts the process.  After a loss each rests: 0.1 s, and twice as long
after each further loss.  After `FAILURES_MAX` losses in a row it is tripped: calls fail
at once, and a start is tried every `REST_MAX_S`.  A process that stays ready for
`STEADY_S` resets the count.

Sans-IO: the service acts on the state, and reports events.

Source: the rest is a truncated exponential backoff; tripping is the circuit breaker of
M. Nygard, "Release It!", 2007.
"""

from __future__ import annotations

import enum
from typing import Final

from asyncrpc.core.state_table import StateTable

REST_S: Final = 0.1  # after the first loss; a start takes seconds anyway
REST_MAX_S: Final = 30.0
FAILURES_MAX: Final = 5  # in a row: too many for an accident
STEADY_S: Final = 60.0


class AttachmentState(enum.Enum):
    """What the web worker must do now."""

    SEEKING = "find out whether a model process runs; start one if none does"
    STARTING = "wait until the process listens"
    LOADING = "wait for the model"
    READY = "nothing: calls may be made"
    LEAVING = "wait for the end of a process that is shutting down"
    RESTING = "wait a moment, then seek again"
    TRIPPED = "fail calls at once; seek again after a while"
    CLOSED = "nothing: the web worker has left"


class AttachmentEvent(enum.Enum):
    """What has happened."""

    FOUND = "a process runs or has been started"
    FOUND_ENDING = "a process runs that is ending, or gives way to another"
    ATTACHED = "the process has accepted the web worker"
    LOADED = "the model can be called"
    ENDING = "the process has said that it ends or has older code"
    GONE = "the ending process has ended, or another one has its place"
    LOST = "the process was lost, or could not make its model"
    LOST_AGAIN = "the process was lost too often in a row"
    RESTED = "the time to rest is over"
    CLOSED = "the web worker leaves"


_S, _E = AttachmentState, AttachmentEvent

TRANSITIONS: Final = StateTable(
    "an attachment",
    {
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
    },
    late=AttachmentEvent,
)


class Attachment:
    """The attachment of one web worker to the model process.

    Attributes:
        state: what the web worker must do now.
        failures: losses in a row.
        losses: losses since the beginning.
        problem: how the process was last lost; empty: it was never lost.
        wakes_at_s: when the rest is over; None: the web worker does not rest.
    """

    __slots__ = ("_ready_s", "failures", "losses", "problem", "state", "wakes_at_s")

    def __init__(self) -> None:
        self.state = AttachmentState.SEEKING
        self.failures = 0
        self.losses = 0
        self.problem = ""
        self.wakes_at_s: float | None = None
        self._ready_s: float | None = None

    def advance(self, event: AttachmentEvent) -> None:
        """Go to the next state."""
        self.state = TRANSITIONS.after(self.state, event)

    def load(self, now_s: float) -> None:
        """Note that the model can be called."""
        if self.state is AttachmentState.LOADING:
            self._ready_s = now_s
        self.advance(AttachmentEvent.LOADED)

    def lose(self, now_s: float, problem: str) -> None:
        """Note that the process was lost, or could not make its model."""
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
        """Return the seconds left to rest; if there are none, begin to seek again."""
        left_s = 0.0 if self.wakes_at_s is None else self.wakes_at_s - now_s
        if left_s <= 0:
            self.wakes_at_s = None
            self.advance(AttachmentEvent.RESTED)
        return max(left_s, 0.0)
