"""Which sequences take part in a step, and what they hold."""

from __future__ import annotations

import pytest

from asyncrpc.serving.batching.machine.sequences import (
    INSIDE,
    TRANSITIONS,
    ModelSequence,
    SequenceEvent,
    SequenceLimits,
    SequenceSchedule,
    SequenceState,
)


class Model:
    """A schedule, with sequences that are known by their names."""

    def __init__(
        self, slots: int = 2, inside: int = 4, memory: int | None = 10
    ) -> None:
        limits = SequenceLimits(slots, inside, slots, memory)
        self.schedule: SequenceSchedule[str] = SequenceSchedule(limits)
        self.all: dict[str, ModelSequence[str]] = {}

    def enter(self, names: str, memory: int = 1) -> None:
        for name in names:
            sequence = self.all[name] = ModelSequence(name, memory)
            self.schedule.admit(sequence)
            self.schedule.on_entered(sequence)

    def begin(self) -> str:
        return "".join(sequence.subject for sequence in self.schedule.begin_step())

    def step(self, last: str = "", behind: str = "") -> str:
        chosen = self.begin()
        for name in chosen:
            self.schedule.on_stepped(
                self.all[name], is_last=name in last, is_behind=name in behind
            )
        return chosen

    def leave(self) -> str:
        leaving = self.schedule.leaving()
        for sequence in leaving:
            self.schedule.on_left(sequence)
        return "".join(sequence.subject for sequence in leaving)


def test_admitted_sequence_takes_part_in_the_next_step() -> None:
    model = Model(slots=3)
    model.enter("ab")
    assert model.step() == "ab"
    model.enter("c")
    assert model.step() == "abc"


def test_ended_sequence_leaves_and_frees_its_memory() -> None:
    model = Model()
    model.enter("ab", memory=4)
    assert (model.schedule.room, model.schedule.memory_free) == (0, 2)
    assert model.step(last="a") == "ab"
    assert model.schedule.has_work
    assert model.leave() == "a"
    assert (model.schedule.room, model.schedule.memory_free) == (1, 6)
    assert model.step() == "b"


def test_paused_sequence_keeps_its_memory_and_frees_its_slot() -> None:
    model = Model()
    model.enter("ab", memory=2)
    assert model.step(behind="a") == "ab"
    assert [sequence.subject for sequence in model.schedule.paused] == ["a"]
    assert (model.schedule.room, model.schedule.memory_free) == (1, 6)
    model.enter("c", memory=2)
    assert model.step() == "bc"
    model.schedule.on_taken(model.all["a"])
    assert {*model.step(), *model.step()} == {"a", "b", "c"}


def test_slots_rotate_when_more_sequences_are_ready() -> None:
    model = Model(slots=2)
    model.enter("ab")
    model.step(behind="ab")
    model.enter("cd")
    for name in "ab":
        model.schedule.on_taken(model.all[name])
    assert [model.step() for _ in range(4)] == ["cd", "ab", "cd", "ab"]
    assert model.schedule.room == 0


def test_room_is_limited_by_slots_paused_sequences_and_memory() -> None:
    model = Model(slots=2, inside=3)
    assert model.schedule.room == 2
    model.enter("ab")
    model.step(behind="ab")
    assert model.schedule.room == 1, "three may be inside"
    model.enter("c")
    model.step(behind="c")
    assert model.schedule.room == 0
    limits = SequenceLimits(slots=5, inside_max=9, entering_max=1)
    schedule: SequenceSchedule[str] = SequenceSchedule(limits)
    assert (schedule.room, schedule.memory_free) == (1, None)


def test_departed_consumer_frees_its_slot_before_the_next_step() -> None:
    model = Model()
    model.enter("ab")
    assert model.begin() == "ab"
    model.schedule.close(model.all["a"])
    assert model.schedule.leaving() == [], "the model has it in its hands"
    for name in "ab":
        model.schedule.on_stepped(model.all[name], is_last=False, is_behind=False)
    assert model.leave() == "a"
    assert model.step() == "b"
    model.schedule.close(model.all["b"])
    assert model.leave() == "b"
    assert not model.schedule.has_work
    assert model.schedule.inside == 0


def test_consumer_departing_during_admission_frees_its_sequence() -> None:
    schedule: SequenceSchedule[str] = SequenceSchedule(SequenceLimits(1, 1, 1, 5))
    gone, refused = ModelSequence("gone", 5), ModelSequence("refused", 5)
    schedule.admit(gone)
    schedule.close(gone)
    assert schedule.inside_now == (gone,)
    schedule.on_entered(gone)
    assert schedule.leaving() == [gone]
    schedule.on_left(gone)
    schedule.admit(refused)
    schedule.close(refused)
    schedule.on_refused(refused)
    assert (schedule.inside, schedule.memory_free) == (0, 5)
    assert schedule.leaving() == []


def test_refused_sequence_holds_nothing() -> None:
    schedule: SequenceSchedule[str] = SequenceSchedule(SequenceLimits(1, 1, 1, 5))
    sequence = ModelSequence("", 3)
    schedule.admit(sequence)
    assert schedule.memory_free == 2
    schedule.on_refused(sequence)
    assert (schedule.inside, schedule.memory_free) == (0, 5)


def test_waiting_sequence_closes_without_a_trace() -> None:
    schedule: SequenceSchedule[str] = SequenceSchedule(SequenceLimits(1, 1, 1, 5))
    sequence = ModelSequence("", 3)
    schedule.close(sequence)
    assert sequence.state is SequenceState.ENDED
    assert (schedule.inside, schedule.memory_free) == (0, 5)


@pytest.mark.parametrize("state", [state for state in SequenceState if state in INSIDE])
def test_admitted_sequences_end_by_leaving_or_refusal_only(
    state: SequenceState,
) -> None:
    for event, after in TRANSITIONS[state].items():
        if after is SequenceState.ENDED:
            assert event in {SequenceEvent.LEFT, SequenceEvent.REFUSED}
