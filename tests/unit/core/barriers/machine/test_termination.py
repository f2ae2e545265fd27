"""Nobody sees an end while a call is in flight, and everyone sees it when none is.

The first is asserted by `ending_world` whenever a member sees the end; the second here.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrpc.core.barriers.machine.table import SeriesTable
from asyncrpc.core.barriers.machine.termination import Phase, Termination
from asyncrpc.core.barriers.messages import (
    Key,
    KnownArrivals,
    Purpose,
    Report,
    RoundFailed,
)
from tests.unit.core.barriers.machine.ending_world import World
from tests.unit.core.barriers.machine.world import lost, name_of

END = Key(Purpose.END, "", None)
STEPS_MAX = 3000
# These bring the end; everything else may or may not happen.
NEEDED = ("deliver", "answer", "enter", "speak", "leave", "hear")


def play(world: World, choices: random.Random, free: int = 40) -> None:
    """Let anything happen for a while, then only what must; all are gone then."""
    for number in range(STEPS_MAX):
        steps = list(world.steps())
        if number >= free:
            steps = [step for step in steps if step[0] in NEEDED]
        if steps:
            world.take(choices.choice(steps))
            continue
        if not any(member.is_here for member in world.members):
            return
        world.be_silent()
        assert list(world.steps()), [member.machine.missing for member in world.members]
    raise AssertionError("the end does not come")


class TestTheEnd:
    @given(choices=st.randoms(use_true_random=False), size=st.integers(1, 6))
    @settings(max_examples=60)
    def test_all_see_it_and_none_too_early(
        self, choices: random.Random, size: int
    ) -> None:
        world = World(size, own_calls=2, depth=3)
        play(world, choices)
        assert {member.machine.phase for member in world.members} == {Phase.ENDED}

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
        phases = {
            member.machine.phase for member in world.members if not member.is_dead
        }
        assert phases <= {Phase.ENDED}

    @given(
        choices=st.randoms(use_true_random=False),
        size=st.integers(2, 5),
        deaths=st.integers(1, 3),
    )
    @settings(max_examples=100)
    def test_the_restarted_take_part(
        self, choices: random.Random, size: int, deaths: int
    ) -> None:
        """Who comes back before the others have seen the end sees it with them."""
        world = World(size, own_calls=2, depth=3, deaths=deaths, restarts=deaths)
        play(world, choices)
        phases = {
            member.machine.phase for member in world.members if not member.is_dead
        }
        assert phases <= {Phase.ENDED}

    @given(choices=st.randoms(use_true_random=False), size=st.integers(2, 5))
    @settings(max_examples=60)
    def test_a_member_believed_lost_ends_alone(
        self, choices: random.Random, size: int
    ) -> None:
        world = World(size, own_calls=2, depth=3, deaths=1, doubts=2)
        play(world, choices)
        assert all(
            member.machine.is_over for member in world.members if not member.is_dead
        )

    @pytest.mark.parametrize(
        "arguments",
        [
            {"own_calls": [1, 1], "depth": 1},
            {"own_calls": [1, 0], "depth": 3, "calls": 3},
            {"own_calls": [1, 0], "depth": 1, "deaths": 1},
            {"own_calls": [1, 0], "depth": 1, "doubts": 1},
        ],
    )
    def test_two_members_in_every_order_of_events(
        self, arguments: dict[str, Any]
    ) -> None:
        first = World(2, **arguments)
        seen = {first.key()}
        worlds, ends = [first], 0
        while worlds:
            world = worlds.pop()
            steps = list(world.steps())
            if not steps:
                world.be_silent()  # who waits for one that is gone finds out
                steps = list(world.steps())
            if not steps:
                assert not any(member.is_here for member in world.members)
                ends += 1
            for step in steps:
                after = world.copy()
                after.take(step)
                if (key := after.key()) not in seen:
                    seen.add(key)
                    worlds.append(after)
        assert ends
        assert len(seen) > 500


def alone(size: int = 1) -> tuple[Termination, SeriesTable]:
    rounds = SeriesTable(0, size, name_of)
    machine = Termination(0, size, rounds)
    machine.enter()
    return machine, rounds


def join(
    machine: Termination, rounds: SeriesTable, *, busy: bool, started: int
) -> None:
    mark = machine.join(busy=busy, started=started)
    if mark is not None:
        rounds.join(machine.series, is_marked=mark)
    machine.look()


class TestOneMember:
    """Alone, so that what it brings is the whole wave; or the root of three."""

    @pytest.mark.parametrize(
        ("messages", "phases"),
        [
            # (busy, started): it comes to the first wave in any case
            ([(True, 3), (True, 3), (False, 4), (False, 4)], "DDDE"),
            ([(False, 3), (False, 4), (False, 4)], "DDE"),
            ([(False, 3), (True, 3), (False, 3)], "DDE"),
            ([(False, 0), (False, 0)], "DE"),
        ],
    )
    def test_two_idle_waves_without_a_new_call_end_it(
        self, messages: list[tuple[bool, int]], phases: str
    ) -> None:
        machine, rounds = alone()
        initials = ""
        for busy, started in messages:
            join(machine, rounds, busy=busy, started=started)
            initials += machine.phase.name[0]
        assert initials == phases

    def test_losses_before_the_end_are_remembered(self) -> None:
        rounds = SeriesTable(0, 3, name_of)
        machine = Termination(0, 3, rounds)
        machine.receive(RoundFailed(END, 0, -1, lost(2)))
        assert (machine.phase, machine.lost) == (Phase.BEFORE, {2})
        assert rounds.due() == []
        machine.enter()
        assert machine.key.replicas == (0, 1)
        assert machine.missing == [0, 1]

    def test_no_member_is_lost_after_the_end(self) -> None:
        machine, rounds = alone()
        for _ in range(2):
            join(machine, rounds, busy=False, started=0)
        machine.enter()
        machine.lose((0,), "gone")
        assert machine.phase is Phase.ENDED
        assert machine.join(busy=False, started=0) is None

    def test_a_loss_noticed_by_a_busy_member_fails_the_wave(self) -> None:
        machine, rounds = alone(3)
        join(machine, rounds, busy=False, started=0)
        for rank in (1, 2):
            rounds.receive(rank, Report(END, 0, -1, is_marked=True))
        machine.look()
        assert machine.phase is Phase.DRAINING
        machine.series.let_go()
        assert machine.join(busy=True, started=0) is None
        before = machine.series
        machine.lose((1,), "gone")
        assert (before.is_waiting, before.latest) == (False, 1)
        assert {rank for _, rank in rounds.due()} == {1, 2}

    def test_a_loss_does_not_undo_a_passed_wave(self) -> None:
        """Although nobody has looked yet: the others may have left."""
        machine, rounds = alone(2)
        for number in range(2):
            mark = machine.join(busy=False, started=0)
            assert mark is not None
            rounds.join(machine.series, is_marked=mark)
            rounds.receive(1, Report(END, number, number - 1, is_marked=not number))
            if not number:
                machine.look()
                machine.series.let_go()
        machine.lose((1,), "gone")
        assert (machine.phase, machine.lost) == (Phase.ENDED, set())

    def test_a_series_names_the_members_it_leaves_out(self) -> None:
        machine, _ = alone(4)
        for replicas in ((0, 2), None):
            key = END._replace(replicas=replicas)
            machine.receive(
                KnownArrivals(key, 0, -1, is_waiting=True, latest=0, known=2)
            )
            assert machine.lost == {1, 3}
        machine.lose((-1, 4, 77), "gone")  # of no group
        assert (machine.lost, machine.phase) == ({1, 3}, Phase.GATHERING)


@pytest.mark.parametrize("size", [1, 2, 3, 8, 33])
def test_an_idle_group_ends_in_two_waves(size: int) -> None:
    world = World(size, own_calls=0, depth=0)
    messages = 0
    while steps := [step for step in world.steps() if step[0] != "leave"]:
        for step in steps:
            messages += step[0] == "deliver"
            world.take(step)
    assert {member.machine.phase for member in world.members} == {Phase.ENDED}
    assert messages == 2 * 2 * (size - 1)
