"""How long a model process lives: while web workers are attached, and a bit longer.

    ALONE <-> SERVING        web workers come and go
    SERVING -> RETIRED       its code is out of date: another process takes its place,
                             and this one ends with its last web worker
    ALONE, SERVING -> UNMADE its model could not be made: each web worker that asks is
                             told so for a while, and then the process ends

The process has no owner: one of its web workers has started it, and it outlives that.
So it ends by itself once it has been alone for `linger_s`.  An outdated process that is
alone ends at once, so that its memory is free before another loads its model.

Sans-IO: the service acts on the state, and reports events.
"""

from __future__ import annotations

import enum
from typing import Final

from asyncrpc.core.state_table import StateTable

# The web worker that started the process may have died; the others come soon.
FIRST_S: Final = 10.0
UNMADE_S: Final = 1.0  # at least, for the error to reach the attached web workers


class OccupancyState(enum.Enum):
    """What the process must do now."""

    ALONE = "wait for web workers, for a while"
    SERVING = "serve the web workers that are attached"
    RETIRED = "serve the attached web workers, and accept no others"
    UNMADE = "tell each web worker why there is no model, for a while"
    ENDING = "shut down"


class OccupancyEvent(enum.Enum):
    """What has happened."""

    CAME = "a web worker has attached"
    ALL_LEFT = "the last web worker has left"
    OUTDATED = "a web worker has come whose code is newer"
    UNMADE = "the function that makes the model has raised"
    TIME_UP = "the time for this state has passed"
    TOLD_TO_END = "a signal has come"


_S, _E = OccupancyState, OccupancyEvent

TRANSITIONS: Final = StateTable(
    "a process of a model",
    {
        _S.ALONE: {
            _E.CAME: _S.SERVING,
            _E.OUTDATED: _S.ENDING,
            _E.UNMADE: _S.UNMADE,
            _E.TIME_UP: _S.ENDING,
            _E.TOLD_TO_END: _S.ENDING,
        },
        _S.SERVING: {
            _E.ALL_LEFT: _S.ALONE,
            _E.OUTDATED: _S.RETIRED,
            _E.UNMADE: _S.UNMADE,
            _E.TOLD_TO_END: _S.ENDING,
        },
        _S.RETIRED: {
            _E.ALL_LEFT: _S.ENDING,
            _E.UNMADE: _S.UNMADE,
            _E.TOLD_TO_END: _S.ENDING,
        },
        _S.UNMADE: {
            _E.OUTDATED: _S.ENDING,
            _E.TIME_UP: _S.ENDING,
            _E.TOLD_TO_END: _S.ENDING,
        },
        _S.ENDING: {},
    },
    late=OccupancyEvent,
)


class Occupancy:
    """The web workers of one model process, and how long it waits for others.

    Attributes:
        state: what the process must do now.
        ends_at_s: when the process ends if nothing happens; None: it does not end.
    """

    __slots__ = ("_linger_s", "attached", "ends_at_s", "state")

    def __init__(self, linger_s: float, now_s: float) -> None:
        self.state = OccupancyState.ALONE
        self.attached = 0
        self.ends_at_s: float | None = now_s + max(linger_s, FIRST_S)
        self._linger_s = linger_s

    @property
    def takes_others(self) -> bool:
        """Whether another web worker may attach."""
        return self.state not in {OccupancyState.RETIRED, OccupancyState.ENDING}

    def advance(self, event: OccupancyEvent) -> None:
        """Go to the next state."""
        self.state = TRANSITIONS.after(self.state, event)

    def come(self) -> None:
        """Note that a web worker has attached."""
        self.attached += 1
        self.advance(OccupancyEvent.CAME)
        if self.state is OccupancyState.SERVING:
            self.ends_at_s = None

    def leave(self, now_s: float) -> None:
        """Note that a web worker has left, or was lost."""
        self.attached -= 1
        if self.attached:
            return
        self.advance(OccupancyEvent.ALL_LEFT)
        if self.state is OccupancyState.ALONE:
            self.ends_at_s = now_s + self._linger_s

    def fail(self, now_s: float) -> None:
        """Note that the model could not be made."""
        self.advance(OccupancyEvent.UNMADE)
        if self.state is OccupancyState.UNMADE:
            self.ends_at_s = now_s + max(self._linger_s, UNMADE_S)

    def elapse(self, now_s: float) -> None:
        """Advance to `now_s`; call it at `ends_at_s`."""
        if self.ends_at_s is not None and now_s >= self.ends_at_s:
            self.advance(OccupancyEvent.TIME_UP)
