"""Nobody sees an end while a call is in flight, and everyone sees it when none is.

The first is asserted by `ending_world` whenever a member sees the end; the second here.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from asyncrpc.runtime.rounds.machine.termination import Phase, Termination
from tests.unit.runtime.rounds.machine.ending_world import World

STEPS_MAX = 3000
# These bring the end; everything else may or may not happen.
NEEDED = ("deliver", "answer", "enter", "speak", "leave")


def play(world: World, choices: random.Random, free: int = 40) -> None:
    """Let anything happen for a while, then only what must; all are gone then."""
    for number in range(STEPS_MAX):
        steps = list(world.steps())
        if number >= free:
            steps = [step for step in steps if step[0] in NEEDED]
        if steps:
            world.take(choices.choice(steps))
            continue
        if not any(one.is_here for one in world.members):
            return
        world.be_silent()
        assert list(world.steps()), [one.machine.missing for one in world.members]
    raise AssertionError("the end does not come")


class TestTheEnd:
    @given(choices=st.randoms(use_true_random=False), size=st.integers(1, 6))
    @settings(max_examples=60)
    def test_it_is_seen_by_all_and_by_nobody_too_early(
        self, choices: random.Random, size: int
    ) -> None:
        world = World(size, own_calls=2, depth=3)
        play(world, choices)
        assert {one.machine.phase for one in world.members} == {Phase.ENDED}

    @given(
        choices=st.randoms(use_true_random=False),
        size=st.integers(2, 6),
        deaths=st.integers(1, 5),
    )
    @settings(max_examples=60)
    def test_the_dead_are_left_out(
        self, choices: random.Random, size: int, deaths: int
    ) -> None:
        world = World(size, own_calls=2, depth=3, deaths=deaths)
        play(world, choices)
        phases = {one.machine.phase for one in world.members if not one.is_dead}
        assert phases <= {Phase.ENDED}

    @given(choices=st.randoms(use_true_random=False), size=st.integers(2, 5))
    @settings(max_examples=60)
    def test_who_is_believed_lost_ends_alone(
        self, choices: random.Random, size: int
    ) -> None:
        world = World(size, own_calls=2, depth=3, deaths=1, doubts=2)
        play(world, choices)
        assert all(one.machine.is_over for one in world.members if not one.is_dead)

    @pytest.mark.parametrize(
        "given",
        [
            {"own_calls": [1, 1], "depth": 1},
            {"own_calls": [1, 0], "depth": 3, "calls": 3},
            {"own_calls": [1, 0], "depth": 1, "deaths": 1},
            {"own_calls": [1, 0], "depth": 1, "doubts": 1},
        ],
    )
    def test_two_members_in_every_order_of_events(self, given: dict[str, Any]) -> None:
        first = World(2, **given)
        seen = {first.key()}
        worlds, ends = [first], 0
        while worlds:
            world = worlds.pop()
            steps = list(world.steps())
            if not steps:
                assert not any(one.is_here for one in world.members)
                ends += 1
            for step in steps:
                after = world.copy()
                after.take(step)
                if (key := after.key()) not in seen:
                    seen.add(key)
                    worlds.append(after)
        assert ends
        assert len(seen) > 1000


class TestOneMember:
    """Alone, so that what it says is the whole wave."""

    @pytest.mark.parametrize(
        ("words", "phases"),
        [
            # (busy, started): it speaks in the first wave in any case
            ([(True, 3), (True, 3), (False, 4), (False, 4)], "DDDE"),
            ([(False, 3), (False, 4), (False, 4)], "DDE"),
            ([(False, 3), (True, 3), (False, 3)], "DDE"),
            ([(False, 0), (False, 0)], "DE"),
        ],
    )
    def test_it_ends_when_it_was_idle_twice_and_started_nothing(
        self, words: list[tuple[bool, int]], phases: str
    ) -> None:
        machine = Termination(0, 1)
        machine.enter()
        found = ""
        for busy, started in words:
            machine.speak(busy=busy, started=started)
            found += machine.phase.name[0]
        assert found == phases

    def test_before_it_asks_for_the_end_nothing_makes_it_speak(self) -> None:
        machine = Termination(0, 2)
        machine.speak(busy=False, started=0)
        machine.hear(0, 0, 0b10, 0b10)
        assert machine.due() == machine.overdue() == []
        assert machine.missing == [0]
        machine.enter()
        machine.speak(busy=False, started=0)
        assert machine.phase is Phase.DRAINING

    def test_once_it_is_over_nothing_is_told_but_the_end(self) -> None:
        machine = Termination(0, 3)
        machine.hear_end()  # which it has not asked for: it knows better
        assert not machine.is_over
        machine.enter()
        machine.enter()
        assert sorted(machine.awaited()) == [1, 2]
        machine.speak(busy=False, started=0)
        machine.hear_end()
        machine.on_lost(1)
        assert machine.phase is Phase.ENDED
        assert machine.listeners == [1, 2]
        assert machine.hear(0, 0, 0b010, 0)
        assert machine.due() == machine.overdue() == machine.awaited() == []

    def test_a_wave_to_come_ends_the_present_one(self) -> None:
        machine = Termination(0, 2)
        assert not machine.hear(0, 5, 0b10, 0)
        machine.enter()
        machine.speak(busy=False, started=0)
        assert not machine.hear(0, 1, 0b10, 0)
        assert machine.phase is Phase.DRAINING
        assert machine.hear(0, 0, 0b10, 0)
        machine.speak(busy=False, started=0)
        assert machine.is_over

    def test_what_makes_no_sense_is_ignored(self) -> None:
        machine = Termination(0, 2)
        machine.enter()
        machine.on_lost(0)
        machine.on_lost(-1)
        machine.on_lost(2)
        machine.hear(0b100, 0, 0b100, 0b100)
        assert (machine.lost, machine.known, machine.marked) == (0, 0, 0)


class TestCost:
    @pytest.mark.parametrize("size", [2, 3, 8, 33])
    def test_an_idle_group_ends_in_two_waves_of_few_words(self, size: int) -> None:
        machines = [Termination(rank, size) for rank in range(size)]
        words = 0
        for machine in machines:
            machine.enter()
        for _ in range(10 * size):
            for one in machines:
                one.speak(busy=False, started=0)
                for to in one.due():
                    words += 1
                    word = (one.lost, one.wave, one.known, one.marked)
                    if one.phase is Phase.ENDED:
                        machines[to].hear_end()
                    else:
                        machines[to].hear(*word)
        assert {one.phase for one in machines} <= {Phase.ENDED, Phase.DRAINING}
        assert any(one.phase is Phase.ENDED for one in machines)
        assert max(one.wave for one in machines) == 1
        steps = (size - 1).bit_length()
        assert words <= 3 * steps * size


@example(size=2, lost=1)
@given(size=st.integers(2, 70), lost=st.integers(0, 2**70))
def test_a_loss_is_told_on_and_begins_anew(size: int, lost: int) -> None:
    machine = Termination(0, size)
    machine.enter()
    machine.speak(busy=False, started=0)
    is_behind = machine.hear(lost, 0, 0, 0)
    known = lost & ((1 << size) - 1)
    assert machine.lost == known
    assert (machine.phase is Phase.EXCLUDED) == bool(known & 1)
    assert machine.beginning == (1 if known and not known & 1 else 0)
    if not known & 1:
        assert machine.must_speak == bool(known)
        assert is_behind == (lost != known)
