"""Which sequences take part in a step, and what they hold."""

from __future__ import annotations

from collections.abc import Callable

from asyncrpc.serving.batching.machine.sequences import (
    ModelSequence,
    SequenceLimits,
    SequenceSchedule,
)
from tests.unit.stories import Actions, Words, cases

STORIES = """
admitted sequence takes part in the next step:
    model slots:3; enter ab; step = ab; enter c; step = abc
ended sequence leaves and frees its memory:
    model; enter ab memory:4; room = 0; free = 2; step last:a = ab; has-work = True
    leave = a; room = 1; free = 6; step = b
paused sequence keeps its memory and frees its slot:
    model; enter ab memory:2; step behind:a = ab; paused = a; room = 1; free = 6
    enter c memory:2; step = bc; taken a; step-twice = abc
slots rotate when more sequences are ready:
    model; enter ab; step behind:ab = ab; enter cd; taken ab
    step = cd; step = ab; step = cd; step = ab; room = 0
room is limited by slots and paused sequences:  # three may be inside
    model inside:3; room = 2; enter ab; step behind:ab = ab; room = 1
    enter c; step behind:c = c; room = 0
departed consumer frees its slot before the next step:
    # But the model has the sequence in its hands.
    model; enter ab; begin = ab; close a; leave; stepped ab; leave = a
    step = b; close b; leave = b; has-work = False; inside = 0
consumer departing during admission frees its sequence:
    model slots:1 inside:1 memory:5; admit a memory:5; close a; inside-now = a
    entered a; leave = a; admit r memory:5; close r; refused r
    inside = 0; free = 5; leave
refused sequence holds nothing:
    model memory:5; admit a memory:3; free = 2; refused a; inside = 0; free = 5
waiting sequence closes without a trace:
    model memory:5; make a memory:3; close a; state a = ENDED; inside = 0; free = 5
"""


class Model:
    """A schedule, with sequences that are known by their names."""

    schedule: SequenceSchedule[str]

    def model(self, slots: int = 2, inside: int = 4, memory: int | None = 10) -> None:
        self.schedule = SequenceSchedule(SequenceLimits(slots, inside, slots, memory))
        self.all: dict[str, ModelSequence[str]] = {}

    def make(self, name: str, memory: int) -> ModelSequence[str]:
        sequence = self.all[name] = ModelSequence(name, memory)
        return sequence

    def enter(self, names: str, memory: int = 1) -> None:
        for name in names:
            self.schedule.admit(self.make(name, memory))
            self.schedule.on_entered(self.all[name])

    def begin(self) -> str:
        return "".join(sequence.subject for sequence in self.schedule.begin_step())

    def stepped(self, names: str, last: str = "", behind: str = "") -> None:
        for name in names:
            self.schedule.on_stepped(
                self.all[name], is_last=name in last, is_behind=name in behind
            )

    def step(self, **options: str) -> str:
        chosen = self.begin()
        self.stepped(chosen, **options)
        return chosen

    def leave(self) -> str:
        leaving = self.schedule.leaving()
        for sequence in leaving:
            self.schedule.on_left(sequence)
        return "".join(sequence.subject for sequence in leaving)


@cases(STORIES)
def test_schedule_follows_the_story(steps: list[str]) -> None:
    model = Model()

    def each(method: str) -> Callable[[str], None]:
        def act(names: str) -> None:
            for name in names:
                getattr(model.schedule, method)(model.all[name])

        return act

    actions: Actions = {
        "model": model.model,
        "make": lambda name, memory: [model.make(name, memory)][1:],
        "admit": lambda name, memory: model.schedule.admit(model.make(name, memory)),
        "entered": each("on_entered"),
        "refused": each("on_refused"),
        "taken": each("on_taken"),
        "close": each("close"),
        "enter": model.enter,
        "begin": model.begin,
        "stepped": model.stepped,
        "step": model.step,
        "step-twice": lambda: "".join(sorted({*model.step(), *model.step()})),
        "leave": model.leave,
        "room": lambda: model.schedule.room,
        "free": lambda: str(model.schedule.memory_free),
        "inside": lambda: model.schedule.inside,
        "inside-now": lambda: "".join(it.subject for it in model.schedule.inside_now),
        "has-work": lambda: model.schedule.has_work,
        "paused": lambda: "".join(paused.subject for paused in model.schedule.paused),
        "state": lambda name: model.all[name].state.name,
    }
    Words().play(steps, actions)


def test_room_without_sequences_is_that_of_the_entries() -> None:
    limits = SequenceLimits(slots=5, inside_max=9, entering_max=1)
    schedule: SequenceSchedule[str] = SequenceSchedule(limits)
    assert (schedule.room, schedule.memory_free) == (1, None)
