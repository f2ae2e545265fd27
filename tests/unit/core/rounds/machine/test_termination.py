"""Nobody sees an end while a call is in flight, and everyone sees it when none is.

The first is asserted by `ending_world` whenever a member sees the end; the second here.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrpc.core.rounds.machine.messages import (
    Blame,
    KnownArrivals,
    Report,
    RoundFailed,
)
from asyncrpc.core.rounds.machine.table import Rounds
from asyncrpc.core.rounds.machine.termination import Phase, Termination
from tests.unit.core.rounds.machine.ending_world import World
from tests.unit.core.rounds.machine.world import gave_up, lost, name_of

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
    def test_end_is_seen_by_all_members_and_never_too_early(
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
    def test_dead_members_are_left_out_of_the_end(
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
    def test_restarted_members_take_part_in_the_end(
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
    def test_member_believed_lost_ends_alone(
        self, choices: random.Random, size: int
    ) -> None:
        world = World(size, own_calls=2, depth=3, deaths=1, doubts=2)
        play(world, choices)
        assert all(
            member.machine.is_over for member in world.members if not member.is_dead
        )

    @pytest.mark.parametrize(
        "setup",
        [
            {"own_calls": [1, 1], "depth": 1},
            {"own_calls": [1, 0], "depth": 3, "calls": 3},
            {"own_calls": [1, 0], "depth": 1, "deaths": 1},
            {"own_calls": [1, 0], "depth": 1, "doubts": 1},
        ],
    )
    def test_two_members_end_for_every_order_of_events(
        self, setup: dict[str, Any]
    ) -> None:
        first = World(2, **setup)
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


def alone(size: int = 1) -> tuple[Termination, Rounds]:
    rounds = Rounds(0, size, name_of)
    machine = Termination(0, size, rounds)
    machine.enter()
    return machine, rounds


def join(machine: Termination, rounds: Rounds, *, busy: bool, started: int) -> None:
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
    def test_member_ends_after_two_idle_waves_without_a_start(
        self, messages: list[tuple[bool, int]], phases: str
    ) -> None:
        machine, rounds = alone()
        phases_seen = ""
        for busy, started in messages:
            join(machine, rounds, busy=busy, started=started)
            phases_seen += machine.phase.name[0]
        assert phases_seen == phases

    def test_loss_before_the_end_is_remembered(self) -> None:
        rounds = Rounds(0, 3, name_of)
        machine = Termination(0, 3, rounds)
        machine.receive(machine.key, RoundFailed(0, -1, lost(2)))
        assert (machine.phase, machine.lost) == (Phase.BEFORE, {2})
        assert rounds.due() == []
        machine.enter()
        assert machine.key.replicas == (0, 1)
        assert machine.missing == [0, 1]

    def test_loss_after_the_end_is_ignored(self) -> None:
        machine, rounds = alone()
        for _ in range(2):
            join(machine, rounds, busy=False, started=0)
        machine.enter()
        machine.lose((0,), "gone")
        assert machine.phase is Phase.ENDED
        assert machine.join(busy=False, started=0) is None

    def test_loss_during_the_wait_restarts_the_wave_and_is_told(self) -> None:
        machine, rounds = alone(3)
        join(machine, rounds, busy=False, started=0)
        before = machine.series
        assert machine.missing == [1, 2]
        machine.lose((2,), "gone")
        failure = before.failure
        assert failure is not None
        assert (failure.blame, failure.missing) == (Blame.LOST, (2,))
        assert {rank for _, rank in rounds.due()} == {1, 2}
        assert machine.key.replicas == (0, 1)
        assert machine.join(busy=True, started=0)  # at once, though busy

    def test_loss_during_work_fails_the_wave_of_the_others(self) -> None:
        machine, rounds = alone(3)
        join(machine, rounds, busy=False, started=0)
        for rank in (1, 2):
            rounds.receive(machine.series, rank, Report(0, -1, is_marked=True))
        machine.look()
        assert machine.phase is Phase.DRAINING
        machine.series.let_go()
        assert machine.join(busy=True, started=0) is None
        before = machine.series
        machine.lose((1,), "gone")
        assert (before.number, before.failure is not None) == (1, True)

    def test_loss_does_not_undo_a_passed_wave(self) -> None:
        """Although nobody has looked yet: the others may have left."""
        machine, rounds = alone(2)
        for number in range(2):
            mark = machine.join(busy=False, started=0)
            assert mark is not None
            rounds.join(machine.series, is_marked=mark)
            report = Report(number, number - 1, is_marked=not number)
            rounds.receive(machine.series, 1, report)
            if not number:
                machine.look()
                machine.series.let_go()
        machine.lose((1,), "gone")
        assert (machine.phase, machine.lost) == (Phase.ENDED, set())

    def test_member_named_as_lost_ends_alone(self) -> None:
        machine, rounds = alone(3)
        join(machine, rounds, busy=False, started=0)
        machine.receive(machine.key, RoundFailed(0, -1, lost(0)))
        assert machine.phase is Phase.EXCLUDED
        assert not machine.series.is_waiting

    def test_series_without_some_members_names_them_as_lost(self) -> None:
        machine, _ = alone(4)
        key = machine.key._replace(replicas=(0, 2))
        here = KnownArrivals(0, -1, is_waiting=True, latest=0, known=2)
        machine.receive(key, here)
        assert machine.lost == {1, 3}
        machine.receive(machine.key._replace(replicas=None), here)
        assert machine.lost == {1, 3}

    def test_loss_of_an_unknown_rank_is_ignored(self) -> None:
        machine, _ = alone(2)
        machine.lose((-1, 2, 77), "gone")
        assert (machine.lost, machine.phase) == (set(), Phase.GATHERING)

    def test_failure_without_a_loss_restarts_the_wave(self) -> None:
        machine, rounds = alone(2)
        join(machine, rounds, busy=False, started=0)
        rounds.receive(machine.series, 1, RoundFailed(0, -1, gave_up(1)))
        machine.look()
        assert (machine.phase, machine.lost) == (Phase.GATHERING, set())
        assert machine.join(busy=True, started=0)


@pytest.mark.parametrize("size", [1, 2, 3, 8, 33])
def test_idle_group_ends_in_two_waves(size: int) -> None:
    world = World(size, own_calls=0, depth=0)
    messages = 0
    while steps := [step for step in world.steps() if step[0] != "leave"]:
        for step in steps:
            messages += step[0] == "deliver"
            world.take(step)
    assert {member.machine.phase for member in world.members} == {Phase.ENDED}
    assert messages == 2 * 2 * (size - 1)
