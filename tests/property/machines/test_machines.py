"""Every machine whose transitions are data does what its table says, and its story."""

from __future__ import annotations

import pytest

from tests.property.machines.catalog import CATALOG
from tests.property.machines.spec import Machine, Part, table_of
from tests.property.machines.stories import Story, play, shown_by, stories_of
from tests.property.machines.walk import walk

each = pytest.mark.parametrize("machine", CATALOG, ids=lambda machine: machine.name)


@each
def test_every_event_in_every_state_follows_the_table(machine: Machine) -> None:
    source = machine.source
    count = len(machine.states_in(source)) * len(machine.events_in(source))
    assert walk(machine, source) == count


@each
def test_every_state_has_a_row_and_every_event_occurs(machine: Machine) -> None:
    table = table_of(machine.source)
    assert table.keys() == set(machine.states_in(machine.source))
    listed = {event for row in table.values() for event in row}
    assert listed == set(machine.events_in(machine.source))
    assert table.late in (set(), listed)  # of one machine, none or all may be late


@pytest.mark.parametrize(
    ("machine", "story"),
    [
        pytest.param(machine, story, id=f"{machine.name}: {story.title}")
        for machine in CATALOG
        for story in stories_of(machine)
    ],
)
def test_machine_plays_its_story(machine: Machine, story: Story) -> None:
    play(machine, machine.source, story)


@each
def test_stories_show_every_transition(machine: Machine) -> None:
    listed = {
        (state.name, event.name)
        for state, row in table_of(machine.source).items()
        for event in row
    }
    assert listed - set(shown_by(machine)) == set()


@pytest.mark.parametrize(
    ("part", "check"),
    [
        pytest.param(part, check, id=f"{machine.name}: {check.__name__}")
        for machine in CATALOG
        for part in machine.all_parts
        for check in part.checks
    ],
)
def test_machine_keeps_its_invariants(part: Part, check: object) -> None:
    assert callable(check)
    check(part.source)
