"""Sequences that a model works on together: each enters and leaves between two steps.

    WAITING -> ENTERING -> READY <-> STEPPING -> LEAVING -> ENDED
                             ^          |
                             +- PAUSED <+   (its consumer is behind)

A step is made with at most `slots` sequences, those that have waited longest for one.
A sequence whose consumer does not take its items is paused: it keeps its memory, and
gives its slot to another.  The other sequences are not affected.

A sequence enters when a slot and the most memory that it can take are free.  All of
this memory is reserved, so no sequence is ever evicted for another.  The part that a
sequence does not need remains unused; preemption would need a model that can drop the
state of a sequence and rebuild it, and each such sequence would be computed twice.

If a consumer leaves while the model works on its sequence, the sequence leaves before
the next step.

Source: G.-I. Yu et al., "Orca: A Distributed Serving System for Transformer-Based
Generative Models", OSDI 2022 (iteration-level scheduling, reservation of the maximum);
W. Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention", SOSP 2023 (what preemption would take).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from asyncrpc.core.state_table import StateTable

T = TypeVar("T")


class SequenceState(enum.Enum):
    """Where a sequence is."""

    WAITING = "it waits for a slot and for memory"
    ENTERING = "the model makes its state"
    ENTERING_UNWANTED = "the model makes its state, and its consumer has gone"
    READY = "it waits for the next step"
    STEPPING = "the model makes a step with it"
    STEPPING_UNWANTED = "the model makes a step with it, and its consumer has gone"
    PAUSED = "its consumer has not taken enough of its items"
    LEAVING = "the model must drop its state"
    ENDED = "the model has no state of it"


class SequenceEvent(enum.Enum):
    """What has happened to a sequence."""

    ADMITTED = "there are a slot and memory for it"
    ENTERED = "the model has made its state"
    REFUSED = "the model has failed to make its state"
    STEP_BEGUN = "it takes part in a step"
    STEP_ENDED = "the step has ended, and it goes on"
    FILLED = "the step has ended, and its consumer is behind"
    FINISHED = "the step was its last one, or has failed"
    TAKEN = "its consumer has taken items"
    CLOSED = "its consumer has gone, or its time is over"
    LEFT = "the model has dropped its state"


_S, _E = SequenceState, SequenceEvent

TRANSITIONS: Final = StateTable(
    "a sequence",
    {
        _S.WAITING: {_E.ADMITTED: _S.ENTERING, _E.CLOSED: _S.ENDED},
        _S.ENTERING: {
            _E.ENTERED: _S.READY,
            _E.REFUSED: _S.ENDED,
            _E.CLOSED: _S.ENTERING_UNWANTED,
        },
        _S.ENTERING_UNWANTED: {_E.ENTERED: _S.LEAVING, _E.REFUSED: _S.ENDED},
        _S.READY: {_E.STEP_BEGUN: _S.STEPPING, _E.CLOSED: _S.LEAVING},
        _S.STEPPING: {
            _E.STEP_ENDED: _S.READY,
            _E.FILLED: _S.PAUSED,
            _E.FINISHED: _S.LEAVING,
            _E.CLOSED: _S.STEPPING_UNWANTED,
        },
        _S.STEPPING_UNWANTED: {
            _E.STEP_ENDED: _S.LEAVING,
            _E.FILLED: _S.LEAVING,
            _E.FINISHED: _S.LEAVING,
        },
        _S.PAUSED: {_E.TAKEN: _S.READY, _E.CLOSED: _S.LEAVING},
        _S.LEAVING: {_E.LEFT: _S.ENDED},
        _S.ENDED: {},
    },
    late=SequenceEvent,
)

# States in which the model has or makes the state of a sequence.
INSIDE: Final = frozenset(_S) - {_S.WAITING, _S.ENDED}


@dataclass(frozen=True, slots=True)
class SequenceLimits:
    """How many sequences a model takes.

    Attributes:
        inside_max: sequences whose state it has, including paused ones.
        entering_max: sequences that enter between two steps.
        memory_max: memory of all of them; None: no limit.
    """

    slots: int
    inside_max: int
    entering_max: int
    memory_max: int | None = None


class ModelSequence(Generic[T]):
    """One sequence.

    Attributes:
        subject: the service's own object, which is not read here.
        memory: the most that it takes.
    """

    __slots__ = ("memory", "state", "subject")

    def __init__(self, subject: T, memory: int) -> None:
        self.subject = subject
        self.memory = memory
        self.state = SequenceState.WAITING

    def advance(self, event: SequenceEvent) -> SequenceState:
        """Go to the next state."""
        self.state = TRANSITIONS.after(self.state, event)
        return self.state


class SequenceSchedule(Generic[T]):
    """The sequences whose state a model has.

    Attributes:
        memory_held: the most memory that all of them take together.
    """

    def __init__(self, limits: SequenceLimits) -> None:
        self._limits = limits
        self._inside: dict[ModelSequence[T], None] = {}
        self._ready: dict[
            ModelSequence[T], None
        ] = {}  # the one first that waited longest
        self._paused: dict[ModelSequence[T], None] = {}
        self._leaving: dict[ModelSequence[T], None] = {}
        self.memory_held = 0

    @property
    def inside(self) -> int:
        """How many sequences there are."""
        return len(self._inside)

    @property
    def inside_now(self) -> tuple[ModelSequence[T], ...]:
        """The sequences whose state the model has or makes."""
        return tuple(self._inside)

    @property
    def paused(self) -> tuple[ModelSequence[T], ...]:
        """The paused sequences, the longest paused first."""
        return tuple(self._paused)

    @property
    def has_work(self) -> bool:
        """Return whether a step can be made, or a sequence must leave."""
        return bool(self._ready or self._leaving)

    @property
    def memory_free(self) -> int | None:
        """The free memory; None: it has no limit."""
        most = self._limits.memory_max
        return None if most is None else most - self.memory_held

    @property
    def room(self) -> int:
        """How many sequences may enter now."""
        limits = self._limits
        return max(
            0,
            min(
                limits.entering_max,
                limits.slots - len(self._ready),
                limits.inside_max - len(self._inside),
            ),
        )

    def admit(self, sequence: ModelSequence[T]) -> None:
        """Let a sequence enter; the caller has checked room and memory."""
        self.memory_held += sequence.memory
        self._inside[sequence] = None
        self._feed(sequence, SequenceEvent.ADMITTED)

    def on_entered(self, sequence: ModelSequence[T]) -> None:
        """Note that the model has made the state of a sequence."""
        self._feed(sequence, SequenceEvent.ENTERED)

    def on_refused(self, sequence: ModelSequence[T]) -> None:
        """Note that the model has failed to make the state of a sequence."""
        self._feed(sequence, SequenceEvent.REFUSED)

    def begin_step(self) -> list[ModelSequence[T]]:
        """Begin a step; return its sequences."""
        chosen = list(self._ready)[: self._limits.slots]
        for sequence in chosen:
            self._feed(sequence, SequenceEvent.STEP_BEGUN)
        return chosen

    def on_stepped(
        self, sequence: ModelSequence[T], *, is_last: bool, is_behind: bool
    ) -> None:
        """Note the end of a step for one of its sequences."""
        event = SequenceEvent.STEP_ENDED
        if is_last:
            event = SequenceEvent.FINISHED
        elif is_behind:
            event = SequenceEvent.FILLED
        self._feed(sequence, event)

    def on_taken(self, sequence: ModelSequence[T]) -> None:
        """Note that the consumer has taken enough items to continue."""
        self._feed(sequence, SequenceEvent.TAKEN)

    def close(self, sequence: ModelSequence[T]) -> None:
        """Note that the items of a sequence are no longer wanted."""
        self._feed(sequence, SequenceEvent.CLOSED)

    def leaving(self) -> list[ModelSequence[T]]:
        """Return the sequences whose state the model must drop."""
        return list(self._leaving)

    def on_left(self, sequence: ModelSequence[T]) -> None:
        """Note that the model has dropped the state of a sequence."""
        self._feed(sequence, SequenceEvent.LEFT)

    def _feed(self, sequence: ModelSequence[T], event: SequenceEvent) -> None:
        before = sequence.state
        after = sequence.advance(event)
        if after is before:
            return
        for state, group in self._groups:
            if state is before:
                del group[sequence]
            if state is after:
                group[sequence] = None
        if after is SequenceState.ENDED and before in INSIDE:
            del self._inside[sequence]
            self.memory_held -= sequence.memory

    @property
    def _groups(self) -> tuple[tuple[SequenceState, dict[ModelSequence[T], None]], ...]:
        return (
            (SequenceState.READY, self._ready),
            (SequenceState.PAUSED, self._paused),
            (SequenceState.LEAVING, self._leaving),
        )
