"""What a worker does from the notice of its end until the end, and when.

    WATCHING -notice-> AGREEING (on the last step) -> FINISHING (its steps end)
             -> SAVING (callbacks run) -> STOPPING (the program's block is cancelled)
             -> LEAVING (the worker drains) -> ENDED

Workers in lockstep agree first: otherwise a worker that has stopped before a step might
be awaited by another that is already in this step.  The last step is the latest that
any of them has begun.

Each state has a share of the grace, after which the next one is entered in any case: a
step or a callback that hangs does not use up the shares of the others.  The unused part
of a share is left to the next states.

A block that ends by itself is not cancelled; if it ends before any notice, there is
nothing to do.  Further notices change nothing: schedulers repeat them (Slurm sends
SIGTERM again at the time limit).

Sans-IO: the service acts on the state, and reports events.

Source: exit codes are those of sysexits.h (`EX_TEMPFAIL`, "the user is invited to retry
the operation") and, for the rest, of shells: 128 plus the number of the signal.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final

from asyncrpc.core.state_table import StateTable

EXIT_SAVED: Final = 75  # EX_TEMPFAIL: all was saved, the program can be started again
_SHELL_SIGNAL: Final = 128


class PreemptionState(enum.Enum):
    """What the worker must do now."""

    WATCHING = "nothing: no end has been announced"
    AGREEING = "agree with the group on the last step; no step begins"
    FINISHING = "wait for the end of the last step"
    SAVING = "run the callbacks"
    SAVING_LAST = "run the callbacks; the block has ended"
    STOPPING = "cancel the block, and wait for its end"
    LEAVING = "let the worker drain and leave"
    ENDED = "nothing: all is over"


class PreemptionEvent(enum.Enum):
    """What has happened."""

    NOTICE = "an end was announced, and no step is open"
    NOTICE_IN_STEP = "an end was announced, and a step is open"
    NOTICE_IN_LOCKSTEP = "an end was announced, and the group has steps in common"
    STEPS_LEFT = "the group has agreed; a step is open, or another is to be made"
    STEPS_ENDED = "the last step has ended"
    SAVED = "every callback has ended, or its time has passed"
    TIME_UP = "the time for this state has passed"
    BLOCK_ENDED = "the block has ended"
    LEFT = "the worker has ended"


_S, _E = PreemptionState, PreemptionEvent

TRANSITIONS: Final = StateTable(
    "a block that a preemption may end",
    {
        _S.WATCHING: {
            _E.NOTICE: _S.SAVING,
            _E.NOTICE_IN_STEP: _S.FINISHING,
            _E.NOTICE_IN_LOCKSTEP: _S.AGREEING,
            _E.BLOCK_ENDED: _S.ENDED,
        },
        _S.AGREEING: {
            _E.STEPS_LEFT: _S.FINISHING,
            _E.STEPS_ENDED: _S.SAVING,
            _E.BLOCK_ENDED: _S.SAVING_LAST,
        },
        _S.FINISHING: {
            _E.STEPS_ENDED: _S.SAVING,
            _E.TIME_UP: _S.SAVING,
            _E.BLOCK_ENDED: _S.SAVING_LAST,
        },
        _S.SAVING: {_E.SAVED: _S.STOPPING, _E.BLOCK_ENDED: _S.SAVING_LAST},
        _S.SAVING_LAST: {_E.SAVED: _S.LEAVING},
        _S.STOPPING: {_E.BLOCK_ENDED: _S.LEAVING, _E.TIME_UP: _S.LEAVING},
        _S.LEAVING: {_E.LEFT: _S.ENDED},
        _S.ENDED: {},
    },
    late=PreemptionEvent,
)

# The share of the grace by which each state is over.  The last one is not 1: after the
# worker has drained, connections and threads are closed, and the interpreter ends.
SHARES: Final[Mapping[PreemptionState, float]] = {
    _S.AGREEING: 0.2,
    _S.FINISHING: 0.4,
    _S.SAVING: 0.8,
    _S.SAVING_LAST: 0.8,
    _S.STOPPING: 0.85,
    _S.LEAVING: 0.95,
}


class Preempting:
    """The end of one worker, from its notice on.

    Attributes:
        state: what the worker must do now.
        grace_s: seconds from the notice to the end.
        steps_begun: number of steps that have ever begun.
        steps_open: number of those that have not ended.
        last_step: how many steps the group makes; None: as many as have begun.
        noticed_at_s: when the notice came; None: there was none.
        was_torn: whether the callbacks began while a step was open.
        unsaved: number of callbacks that failed or were too late; None: the callbacks
            have not ended.
    """

    __slots__ = (
        *("grace_s", "is_lockstep", "last_step", "noticed_at_s", "state"),
        *("steps_begun", "steps_open", "unsaved", "was_torn"),
    )

    def __init__(self, grace_s: float, *, is_lockstep: bool) -> None:
        self.state = PreemptionState.WATCHING
        self.grace_s = grace_s
        self.is_lockstep = is_lockstep
        self.steps_begun = self.steps_open = 0
        self.last_step: int | None = None
        self.noticed_at_s: float | None = None
        self.was_torn = False
        self.unsaved: int | None = None

    @property
    def wakes_at_s(self) -> float | None:
        """When the time of the state is up; None: never."""
        if self.noticed_at_s is None or self.state not in SHARES:
            return None
        return self.noticed_at_s + SHARES[self.state] * self.grace_s

    @property
    def may_step(self) -> bool:
        """Whether a step may begin now."""
        if self.state is PreemptionState.FINISHING:
            return self._steps_left > 0
        return self.state is PreemptionState.WATCHING

    @property
    def _steps_left(self) -> int:
        return 0 if self.last_step is None else self.last_step - self.steps_begun

    def advance(self, event: PreemptionEvent) -> None:
        """Go to the next state."""
        self.state = TRANSITIONS.after(self.state, event)
        if self.state is PreemptionState.SAVING:
            self.was_torn = self.steps_open > 0

    def notice(self, now_s: float) -> None:
        """Take the notice of the end; all but the first change nothing."""
        if self.state is not PreemptionState.WATCHING:
            return
        self.noticed_at_s = now_s
        if self.is_lockstep:
            self.advance(PreemptionEvent.NOTICE_IN_LOCKSTEP)
        elif self.steps_open:
            self.advance(PreemptionEvent.NOTICE_IN_STEP)
        else:
            self.advance(PreemptionEvent.NOTICE)

    def agree(self, last_step: int) -> None:
        """Take the last step on which the group, or this worker alone, has decided."""
        self.last_step = last_step
        if self.steps_open or self._steps_left > 0:
            self.advance(PreemptionEvent.STEPS_LEFT)
        else:
            self.advance(PreemptionEvent.STEPS_ENDED)

    def begin_step(self) -> None:
        """Count a step that begins."""
        self.steps_begun += 1
        self.steps_open += 1

    def end_step(self) -> None:
        """Count a step that has ended."""
        self.steps_open -= 1
        is_finishing = self.state is PreemptionState.FINISHING
        if is_finishing and not self.steps_open and self._steps_left <= 0:
            self.advance(PreemptionEvent.STEPS_ENDED)

    def on_saved(self, unsaved: int) -> None:
        """Take the end of the callbacks, `unsaved` of which did not end well."""
        self.unsaved = unsaved
        self.advance(PreemptionEvent.SAVED)

    def exit_code(self, signal_number: int) -> int:
        """Return the exit code of the process."""
        if self.unsaved == 0 and not self.was_torn:
            return EXIT_SAVED
        return _SHELL_SIGNAL + signal_number
