"""Members that pass different replicas under one tag are found out, and named."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrpc.core.barriers.machine.series import ELSEWHERE_MAX, Series
from asyncrpc.core.barriers.machine.table import SeriesTable
from asyncrpc.core.barriers.messages import (
    Blame,
    Failure,
    KnownArrivals,
    TagRound,
    WaitsElsewhere,
)
from tests.unit.core.barriers.machine.test_series import (
    ALL,
    CHOICES,
    names_are_right,
    nobody_waits,
    ranks_of,
)
from tests.unit.core.barriers.machine.world import (
    Call,
    World,
    call,
    explore,
    name_of,
)


def waits_across(world: World) -> list[str]:
    """Name every two members of which each waits for the other, in two series.

    Where a member of either is late they may be found out when it comes.
    """
    return [
        f"{rank} is in {here.key.replicas}, {other} in {there.key.replicas}"
        for rank, member in enumerate(world.members)
        for here in member.calls.values()
        for other in here.ranks
        for there in world.members[other].calls.values()
        if there.key.replicas != here.key.replicas
        and rank in there.ranks
        and not any(
            is_late(world, candidate) for candidate in (*here.ranks, *there.ranks)
        )
    ]


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


@pytest.mark.parametrize("ticks", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "replicas",
    [
        [(0, 1), (1, 0)],
        [(0, 1), None, None],
        [None, (0, 1), None],
        [None, None, (0, 2)],
        [(0, 1), (0, 1), None],
        [None, (1, 0, 2), (1, 0, 2)],
        [(0, 2), None, (1, 2)],
        [(0, 2), (1, 2), None],
    ],
)
def test_two_members_that_wait_for_each_other_are_told(
    replicas: list[tuple[int, ...] | None], ticks: int
) -> None:
    programs: list[list[Call]] = [[call("tag", replica)] for replica in replicas]
    assert explore(World(programs, ticks=ticks), mismatch_is_found)


@given(size=st.integers(2, 32), wrong=st.integers(1, 3), choices=CHOICES)
def test_all_members_learn_of_a_mismatch(
    size: int, wrong: int, choices: random.Random
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


@given(size=st.integers(2, 9), kinds=st.integers(2, 3), choices=CHOICES)
def test_no_deadlock_with_any_replicas(
    size: int, kinds: int, choices: random.Random
) -> None:
    """Each calls with one of those that it is in; some are in none, or late."""
    subsets = [
        tuple(choices.sample(range(size), choices.randint(2, size)))
        for _ in range(kinds)
    ]
    programs: list[list[Call]] = []
    for rank in range(size):
        mine = [subset for subset in subsets if rank in subset]
        mine = choices.sample(mine, min(len(mine), choices.choice([0, 1, 1, 1])))
        programs.append([call("tag", subset) for subset in mine])
    world = World(programs, ticks=choices.randint(0, size))
    world.play(choices)
    names_are_right(world)
    assert not waits_across(world)


def test_the_error_names_both_members_and_their_replicas() -> None:
    world = World([[call("tag", tuple(reversed(range(12))))], *[[ALL]] * 11])
    world.settle()
    end = world.members[5].ends[0]
    assert isinstance(end, Failure)
    assert "with replicas [11, 10, 9, 8, 7, 6, 5, 4, and 4 more]" in end.problem
    assert "with all 12 ranks" in end.problem
    assert "rank 0 ('a')" in end.problem


class TestOneMember:
    """Rank 1 of four; the root is its neighbour, and 2 its child, in all of them."""

    def table_and_series(self) -> tuple[SeriesTable, Series]:
        series_table = SeriesTable(1, 4, name_of)
        return series_table, series_table.series(ALL)

    def elsewhere(
        self, *replicas: int, at: int = 0, number: int = 0, of: int = 3
    ) -> WaitsElsewhere:
        return WaitsElsewhere(ALL, number, of, TagRound(replicas, at))

    @pytest.mark.parametrize("blame", [None, *Blame])
    def test_it_says_once_where_it_waits_or_failed_for_a_mismatch(
        self, blame: Blame | None
    ) -> None:
        series_table, series = self.table_and_series()
        other = series_table.series(call("tag", (0, 1)))
        series_table.join(other)
        if blame is not None:
            other.fail(Failure(blame, "problem"))
        series_table.due()
        here = KnownArrivals(ALL, 0, -1, is_waiting=True, latest=0, known=1)
        waits = self.elsewhere(0, 1, of=1)
        series_table.receive(0, here)
        is_told = blame in {None, Blame.MISMATCH}
        assert (waits in series.notices_for(0)) == is_told
        series_table.due()
        series_table.receive(0, here)
        assert waits not in series.notices_for(0)
        if blame is not None:
            # It has gone on since.
            series_table.join(series_table.series(call("tag", (1,))))
            series_table.receive(
                0, KnownArrivals(ALL, 1, -1, is_waiting=True, latest=1, known=1)
            )
            assert series.elsewhere == []

    def test_a_doubt_is_looked_at_when_the_member_comes(self) -> None:
        series_table, series = self.table_and_series()
        series_table.receive(
            0, KnownArrivals(ALL, 0, -1, is_waiting=True, latest=0, known=1)
        )
        series_table.receive(0, self.elsewhere(3, 1))
        series_table.join(series)
        assert series.failure is not None
        assert series.failure.failed_with == TagRound((3, 1), 0)
        # It counts as come to.
        assert series_table.series(call("tag", (3, 1))).number == 0

    def test_a_doubt_about_a_round_it_has_come_to_is_ignored(self) -> None:
        series_table, series = self.table_and_series()
        other = series_table.series(call("tag", (3, 1)))
        series_table.join(other)
        other.fail(Failure(Blame.GAVE_UP, "problem"))
        series_table.join(series)
        series_table.receive(0, self.elsewhere(3, 1))
        series_table.receive(0, self.elsewhere(3, 2))  # of others
        assert series.is_waiting
        series_table.receive(0, self.elsewhere(3, 1, at=1))
        assert series.failure is not None

    def test_a_doubt_about_a_member_that_has_come_is_ignored(self) -> None:
        series_table, series = self.table_and_series()
        series_table.join(series)
        series_table.receive(
            0, KnownArrivals(ALL, 0, -1, is_waiting=True, latest=0, known=9)
        )
        series_table.receive(0, self.elsewhere(3, 1))
        assert series.is_waiting

    def test_doubts_are_passed_on_and_bounded(self) -> None:
        series_table, series = self.table_and_series()
        series_table.join(series)
        series_table.due()
        for number in range(ELSEWHERE_MAX + 2):
            series_table.receive(0, self.elsewhere(3, 2, at=number))
            series_table.receive(0, self.elsewhere(3, 2, at=number, number=1))
        assert len(series.elsewhere) == ELSEWHERE_MAX
        assert series_table.due() == [(series, 2)]
        assert len(series.notices_for(2)) == 1 + ELSEWHERE_MAX
