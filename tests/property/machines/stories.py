"""Stories: short traces of a machine that a person can follow.

    it is used and shut down:
        NEW -START-> STARTING -STARTED-> RUNNING -SHUT_DOWN-> DRAINING -DRAINED-> CLOSED
    it is not started again: CLOSED -START-x

A title, the first state, and events with the states that follow them; lines that go on
are indented.  An event that is refused, and changes nothing, ends in `-x`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Final

from tests.property.machines.spec import Machine
from tests.property.machines.walk import error_of, facts, led, paths_to_all

_EVENT: Final = re.compile(r"-(\w+)-([>x])", re.ASCII)


@dataclass(frozen=True, slots=True)
class Step:
    """One step: an event in a state, and the state after it; None: it is refused."""

    before: str
    event: str
    after: str | None


@dataclass(frozen=True, slots=True)
class Story:
    """A trace, from its first state on."""

    title: str
    first: str
    steps: tuple[Step, ...]


def stories_of(machine: Machine) -> list[Story]:
    texts = re.split(r"\n(?=\S)", machine.stories.strip())
    pairs = (text.split(":", 1) for text in texts)
    return [_story(title, *path.split()) for title, path in pairs]


def _story(title: str, first: str, *words: str) -> Story:
    state, steps = first, []
    todo = iter(words)
    for word in todo:
        match = _EVENT.fullmatch(word)
        if match is None:
            raise ValueError(f"{title!r}: {word!r} is no event")
        after = next(todo) if match[2] == ">" else None
        steps.append(Step(state, match[1], after))
        state = after or state
    return Story(title, first, tuple(steps))


def shown_by(machine: Machine) -> Iterator[tuple[str, str]]:
    for story in stories_of(machine):
        for step in story.steps:
            yield step.before, step.event


def play(machine: Machine, build: ModuleType, story: Story) -> None:
    """Let a story happen."""
    states, events = machine.states_in(build), machine.events_in(build)
    if story.first in machine.starts:
        subject = machine.begin(build, story.first)
    else:
        paths = paths_to_all(machine, build)
        assert states[story.first] in paths, f"{story.first} cannot be reached"
        subject = led(machine, build, paths[states[story.first]])
    assert machine.state_of(subject) is states[story.first], story.title
    for step in story.steps:
        before = facts(subject)
        error = error_of(machine, subject, events[step.event])
        if step.after is None:
            assert error is not None, f"{step} of {story.title!r} is not refused"
            assert facts(subject) == before, (
                f"{step} of {story.title!r} changes something"
            )
        else:
            assert error is None, f"{step} of {story.title!r}: {error!r}"
            state = machine.state_of(subject)
            assert state is states[step.after], f"{step} of {story.title!r}: {state}"
