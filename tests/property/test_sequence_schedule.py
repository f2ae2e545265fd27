"""Sequences of a model: memory is never exceeded, no slot is lost, nobody is starved.

Hypothesis plays requests, consumers that are behind, take, and go, and the model, which
lets sequences enter, makes steps, and ends or fails them.
"""

from __future__ import annotations

from collections import Counter

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from asyncrpc.serving.batching.machine.sequences import (
    INSIDE,
    ModelSequence,
    SequenceLimits,
    SequenceSchedule,
    SequenceState,
)

SLOTS, INSIDE_MAX, MEMORY_MAX = 2, 5, 10
# Each that is ready is in one of so many steps.
STEPS_MAX = -(-INSIDE_MAX // SLOTS)


class Generations(RuleBasedStateMachine):
    """One model between two of its functions."""

    def __init__(self) -> None:
        super().__init__()
        limits = SequenceLimits(SLOTS, INSIDE_MAX, SLOTS, MEMORY_MAX)
        self.schedule: SequenceSchedule[int] = SequenceSchedule(limits)
        self.all: list[ModelSequence[int]] = []
        self.entering: list[ModelSequence[int]] = []
        self.stepping: list[ModelSequence[int]] = []
        self.entered: Counter[int] = Counter()
        self.left: Counter[int] = Counter()
        self.passed_over: Counter[int] = Counter()
        self.closed: set[int] = set()

    @rule(memory=st.integers(1, MEMORY_MAX), is_made=st.booleans())
    def admit(self, memory: int, is_made: bool) -> None:  # noqa: FBT001
        sequence = ModelSequence(len(self.all), memory)
        free = self.schedule.memory_free
        assert free is not None
        if not self.schedule.room or memory > free:
            return
        self.all.append(sequence)
        self.schedule.admit(sequence)
        if not is_made:
            self.entering.append(sequence)
            return
        self.entered[sequence.subject] += 1
        self.schedule.on_entered(sequence)

    @precondition(lambda self: self.entering)
    @rule(is_refused=st.booleans())
    def enter(self, is_refused: bool) -> None:  # noqa: FBT001
        sequence = self.entering.pop(0)
        if is_refused:
            self.schedule.on_refused(sequence)
        else:
            self.entered[sequence.subject] += 1
            self.schedule.on_entered(sequence)

    @precondition(lambda self: not self.stepping)
    @rule()
    def begin_step(self) -> None:
        ready = [
            sequence for sequence in self.all if sequence.state is SequenceState.READY
        ]
        self.stepping = self.schedule.begin_step()
        assert len(self.stepping) == min(SLOTS, len(ready))
        for sequence in ready:
            self.passed_over[sequence.subject] += 1
            if sequence in self.stepping:
                assert sequence.subject not in self.closed
                self.passed_over[sequence.subject] = 0
            assert self.passed_over[sequence.subject] < STEPS_MAX

    @precondition(lambda self: self.stepping)
    @rule(last=st.sets(st.integers(0, 1)), behind=st.sets(st.integers(0, 1)))
    def end_step(self, last: set[int], behind: set[int]) -> None:
        for index, sequence in enumerate(self.stepping):
            self.schedule.on_stepped(
                sequence, is_last=index in last, is_behind=index in behind
            )
            assert sequence.state is not SequenceState.STEPPING
            if sequence.subject in self.closed or index in last:
                assert sequence.state is SequenceState.LEAVING
        self.stepping = []

    @precondition(lambda self: self.all)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.all))
        was_paused = sequence.state is SequenceState.PAUSED
        self.schedule.on_taken(sequence)
        if was_paused:
            assert sequence.state is SequenceState.READY

    @precondition(lambda self: self.all)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.all))
        self.schedule.close(sequence)
        self.closed.add(sequence.subject)

    @rule()
    def leave(self) -> None:
        for sequence in self.schedule.leaving():
            assert sequence not in self.stepping
            self.left[sequence.subject] += 1
            self.schedule.on_left(sequence)

    @invariant()
    def memory_is_that_of_inside_sequences(self) -> None:
        inside = [sequence for sequence in self.all if sequence.state in INSIDE]
        held = sum(sequence.memory for sequence in inside)
        assert self.schedule.memory_held == held <= MEMORY_MAX
        assert set(self.schedule.inside_now) == set(inside)
        assert len(inside) <= INSIDE_MAX

    @invariant()
    def each_state_is_dropped_once(self) -> None:
        for sequence in self.all:
            is_inside = sequence.state in INSIDE
            may_be = self.entered[sequence.subject] - (
                is_inside and self.entered[sequence.subject]
            )
            assert self.left[sequence.subject] == may_be

    def teardown(self) -> None:
        """All end, once their consumers go and the model returns."""
        for sequence in self.all:
            self.schedule.close(sequence)
        while self.entering:
            self.enter(is_refused=False)
        self.end_step(last=set(), behind=set())
        self.leave()
        assert self.schedule.inside == self.schedule.memory_held == 0
        assert not self.schedule.has_work


TestGenerations = Generations.TestCase
