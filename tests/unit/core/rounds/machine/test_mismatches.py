"""Members that pass different replicas under one tag are found out, and named."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrpc.core.rounds.machine.messages import (
    Blame,
    Failure,
    KnownArrivals,
    TagRound,
    WaitsElsewhere,
)
from asyncrpc.core.rounds.machine.series import ELSEWHERE_MAX, Series
from asyncrpc.core.rounds.machine.table import Rounds
from tests.unit.core.rounds.machine.test_series import (
    ALL,
    CHOICES,
    names_are_right,
    nobody_waits,
    ranks_of,
)
from tests.unit.core.rounds.machine.world import Call, World, call, explore, name_of


def waits_across(world: World) -> list[str]:
    """Name every two members of which each waits for the other, in two meetings.

    Where a member of either is late they may be found out when it comes.
    """
    pairs = []
    for rank, member in enumerate(world.members):
        for here in member.calls.values():
            for other in here.ranks:
                pairs += [
                    f"{rank} is in {here.key.replicas}, {other} in {there.key.replicas}"
                    for there in world.members[other].calls.values()
                    if there.key.replicas != here.key.replicas
                    and rank in there.ranks
                    and not any(is_late(world, rank) for rank in here.ranks)
                    and not any(is_late(world, rank) for rank in there.ranks)
                ]
    return pairs


def is_late(world: World, rank: int) -> bool:
    member = world.members[rank]
    ends = member.ends.values()
    return not member.calls and not any(isinstance(end, Failure) for end in ends)


def mismatch_is_found(world: World) -> None:
    """No two wait for each other, and what failed does not fail again."""
    names_are_right(world)
    assert not waits_across(world)
    for member in world.members:
        for end in member.ends.values():
            if isinstance(end, Failure):
                assert end.blame is Blame.MISMATCH
                assert len(end.missing) == 2
    used = {member.program[0] for member in world.members}
    if len(used) == 2 and not any(member.calls for member in world.members):
        for key in sorted(used, key=repr):
            for rank in ranks_of(world, key):
                world.members[rank].program.append(key)
            world.settle()
            for rank in ranks_of(world, key):
                member = world.members[rank]
                assert isinstance(member.ends[len(member.program) - 1], tuple)


MISMATCHES = [
    [(0, 1), (1, 0)],
    [(1, 0), (0, 1)],
    [(0, 1), None, None],
    [None, (0, 1), None],
    [(0, 2), None, None],
    [None, None, (0, 2)],
    [(0, 1), (0, 1), None],
    [None, (1, 0, 2), (1, 0, 2)],
    [(0, 2), None, (1, 2)],
    [(0, 2), (1, 2), None],
]


class TestMismatch:
    @pytest.mark.parametrize("replicas", MISMATCHES)
    def test_mismatched_replicas_of_two_waiting_members_are_found(
        self, replicas: list[tuple[int, ...] | None]
    ) -> None:
        programs: list[list[Call]] = [[call("tag", ranks)] for ranks in replicas]
        assert explore(World(programs), mismatch_is_found)

    @pytest.mark.slow
    @pytest.mark.parametrize("replicas", MISMATCHES)
    def test_mismatched_replicas_are_found_despite_a_silence(
        self, replicas: list[tuple[int, ...] | None]
    ) -> None:
        programs: list[list[Call]] = [[call("tag", ranks)] for ranks in replicas]
        assert explore(World(programs, ticks=1), mismatch_is_found)

    @given(size=st.integers(2, 32), wrong=st.integers(1, 3), choices=CHOICES)
    def test_mismatch_reaches_every_member(
        self, size: int, wrong: int, choices: random.Random
    ) -> None:
        """Some pass other replicas, of whom at least one passes the right ones."""
        erring = choices.sample(range(size), min(wrong, size - 1))
        right = [rank for rank in range(size) if rank not in erring]
        theirs = (*erring, *choices.sample(right, choices.randint(1, len(right))))
        if len(theirs) == size:
            theirs = (*erring, *reversed(right))
        programs: list[list[Call]] = [
            [call("tag", theirs if rank in erring else None)] for rank in range(size)
        ]
        world = World(programs, ticks=size)
        world.play(choices)
        nobody_waits(world)
        mismatch_is_found(world)
        for member in world.members:
            end = member.ends[0]
            assert isinstance(end, Failure)
            assert "all members must pass the same" in end.problem

    def test_mismatch_names_members_and_their_replicas(self) -> None:
        many = tuple(reversed(range(12)))
        world = World([[call("tag", many)], *[[ALL]] * 11])
        world.settle()
        end = world.members[5].ends[0]
        assert isinstance(end, Failure)
        assert "with replicas [11, 10, 9, 8, 7, 6, 5, 4, and 4 more]" in end.problem
        assert "with all 12 ranks" in end.problem
        assert "rank 0 ('a')" in end.problem

    @given(size=st.integers(2, 9), kinds=st.integers(2, 3), choices=CHOICES)
    def test_mismatch_of_any_replicas_is_found(
        self, size: int, kinds: int, choices: random.Random
    ) -> None:
        """Each calls with one of those that it is in; some are in none, or late."""
        subsets: list[tuple[int, ...] | None] = [
            tuple(choices.sample(range(size), choices.randint(2, size)))
            for _ in range(kinds)
        ]
        programs: list[list[Call]] = []
        for rank in range(size):
            mine = [
                subset for subset in subsets if subset is not None and rank in subset
            ]
            mine = choices.sample(mine, min(len(mine), choices.choice([0, 1, 1, 1])))
            programs.append([call("tag", replicas) for replicas in mine])
        world = World(programs, ticks=choices.randint(0, size))
        world.play(choices)
        names_are_right(world)
        assert not waits_across(world)


class TestOneMember:
    """Rank 1 of four; the root is its neighbour, and 2 its child, in all of them."""

    def new_series(self) -> tuple[Rounds, Series]:
        rounds = Rounds(1, 4, name_of)
        return rounds, rounds.series(ALL)

    def test_member_reports_once_that_it_waits_elsewhere(self) -> None:
        rounds, series = self.new_series()
        other = rounds.series(call("tag", (0, 1)))
        rounds.join(other)
        rounds.due()
        here = KnownArrivals(0, -1, is_waiting=True, latest=0, known=1)
        rounds.receive(series, 0, here)
        assert rounds.due() == [(series, 0)]
        waits = WaitsElsewhere(0, 1, TagRound((0, 1), 0))
        assert series.messages_for(0)[-1] == waits
        assert waits not in series.messages_for(0)
        rounds.receive(series, 0, here)
        assert rounds.due() == []

    @pytest.mark.parametrize("blame", Blame)
    def test_member_reports_its_last_round_if_a_mismatch_failed_it(
        self, blame: Blame
    ) -> None:
        rounds, series = self.new_series()
        other = rounds.series(call("tag", (0, 1)))
        rounds.join(other)
        other.fail(Failure(blame, "problem"))
        rounds.receive(
            series, 0, KnownArrivals(0, -1, is_waiting=True, latest=0, known=1)
        )
        assert len(series.elsewhere) == (blame is Blame.MISMATCH)
        rounds.join(rounds.series(call("tag", (1,))))  # it has gone on since
        rounds.receive(
            series, 0, KnownArrivals(1, -1, is_waiting=True, latest=1, known=1)
        )
        assert series.elsewhere == []

    def test_early_doubt_is_checked_when_the_member_arrives(self) -> None:
        rounds, series = self.new_series()
        rounds.receive(
            series, 0, KnownArrivals(0, -1, is_waiting=True, latest=0, known=1)
        )
        rounds.receive(series, 0, WaitsElsewhere(0, 3, TagRound((3, 1), 0)))
        rounds.join(series)
        assert series.failure is not None
        assert series.failure.failed_with == TagRound((3, 1), 0)
        assert rounds.series(call("tag", (3, 1))).number == 0  # it counts as come to

    def test_doubt_about_a_round_already_reached_is_ignored(self) -> None:
        rounds, series = self.new_series()
        other = rounds.series(call("tag", (3, 1)))
        rounds.join(other)
        other.fail(Failure(Blame.GAVE_UP, "problem"))
        rounds.join(series)
        rounds.receive(series, 0, WaitsElsewhere(0, 3, TagRound((3, 1), 0)))
        assert series.is_waiting
        rounds.receive(
            series, 0, WaitsElsewhere(0, 3, TagRound((3, 2), 0))
        )  # of others
        assert series.is_waiting
        rounds.receive(series, 0, WaitsElsewhere(0, 3, TagRound((3, 1), 1)))
        assert series.failure is not None

    def test_doubts_are_passed_on_and_bounded(self) -> None:
        rounds, series = self.new_series()
        rounds.join(series)
        rounds.due()
        for number in range(ELSEWHERE_MAX + 2):
            rounds.receive(series, 0, WaitsElsewhere(0, 3, TagRound((3, 2), number)))
            rounds.receive(series, 0, WaitsElsewhere(1, 3, TagRound((3, 2), number)))
        assert len(series.elsewhere) == ELSEWHERE_MAX
        assert rounds.due() == [(series, 2)]
        assert len(series.messages_for(2)) == 1 + ELSEWHERE_MAX
