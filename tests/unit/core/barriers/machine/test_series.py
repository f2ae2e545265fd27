"""No member passes before all have come, none waits for ever, and the next one works.

The members and their links are played; of a few members in every possible order.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrpc.core.barriers.machine import table
from asyncrpc.core.barriers.machine.series import (
    FAILURES_KEPT,
    Series,
    tree_position,
)
from asyncrpc.core.barriers.machine.table import SeriesTable
from asyncrpc.core.barriers.messages import (
    Blame,
    Failure,
    KnownArrivals,
    Report,
    Result,
    RoundFailed,
    SeriesNotice,
    TagRound,
    WaitsElsewhere,
)
from asyncrpc.errors import MalformedError
from tests.inner_state import series_of
from tests.unit.core.barriers.machine.world import (
    Call,
    Passed,
    World,
    call,
    explore,
    name_of,
)

ALL: Call = call("tag")
CHOICES = st.randoms(use_true_random=False)


def ranks_of(world: World, key: Call) -> Sequence[int]:
    return range(world.size) if key.replicas is None else key.replicas


def names_are_right(world: World) -> None:
    """The n-th call of a member passes round n; `World` sees that all had come."""
    for member in world.members:
        for index, end in member.ends.items():
            if not (isinstance(end, Failure) or world.restarts):
                key = member.program[index]
                assert end.number == member.program[:index].count(key)


def nobody_waits(world: World) -> None:
    names_are_right(world)
    for member in world.members:
        assert member.is_dead or len(member.ends) == len(member.program)


def all_pass(world: World) -> None:
    nobody_waits(world)
    ends = [end for member in world.members for end in member.ends.values()]
    assert not [end for end in ends if isinstance(end, Failure)]


def next_one_works(world: World) -> None:
    nobody_waits(world)
    for member in world.members:
        member.program.append(ALL)
    world.settle()
    nobody_waits(world)
    last = last_ends(world)
    assert all(isinstance(end, tuple) and end == last[0] for end in last)


def last_ends(world: World) -> list[Passed | Failure]:
    return [member.ends[len(member.program) - 1] for member in world.members]


Check = Callable[[World], None]
SOME: Call = call("tag", (1, 0))
X, Y = call("x"), call("y", (2, 0))
slow = pytest.mark.slow


class TestEveryOrder:
    @pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
    def test_all_pass(self, size: int) -> None:
        assert explore(World([[ALL]] * size), all_pass)

    @pytest.mark.parametrize("size", [2, 3])
    def test_several_rounds_are_all_passed(self, size: int) -> None:
        assert explore(World([[ALL] * 2] * size), all_pass)

    @pytest.mark.parametrize("size", [2, 3])
    def test_silence_does_no_harm(self, size: int) -> None:
        assert explore(World([[ALL]] * size, ticks=2), all_pass)

    @pytest.mark.parametrize(
        ("size", "rounds", "give_ups", "ticks"),
        [
            (2, 1, 1, 0),
            (3, 1, 1, 0),
            (3, 1, 2, 0),
            (2, 3, 2, 0),  # who gives up may be ahead
            pytest.param(4, 1, 1, 0, marks=slow),
            pytest.param(3, 1, 1, 1, marks=slow),
            pytest.param(3, 2, 1, 0, marks=slow),
        ],
    )
    def test_a_member_that_gives_up_fails_one_round(
        self, size: int, rounds: int, give_ups: int, ticks: int
    ) -> None:
        world = World([[ALL] * rounds] * size, give_ups=give_ups, ticks=ticks)
        assert explore(world, next_one_works)

    @pytest.mark.parametrize(
        ("size", "rounds", "deaths", "give_ups"),
        [
            (2, 1, 1, 0),
            (3, 1, 1, 0),
            (3, 1, 2, 0),
            pytest.param(4, 1, 1, 0, marks=slow),
            pytest.param(3, 1, 1, 1, marks=slow),
            pytest.param(3, 2, 1, 0, marks=slow),
        ],
    )
    def test_no_member_waits_for_a_dead_one(
        self, size: int, rounds: int, deaths: int, give_ups: int
    ) -> None:
        world = World([[ALL] * rounds] * size, deaths=deaths, give_ups=give_ups)
        assert explore(world, nobody_waits)

    @pytest.mark.parametrize("ticks", [0, 1])
    def test_one_tag_serves_several_sets_that_come_in_one_order(
        self, ticks: int
    ) -> None:
        """Although the third member waits for the others while they are elsewhere."""
        assert explore(World([[SOME, ALL], [SOME, ALL], [ALL]], ticks=ticks), all_pass)

    def test_series_of_other_tags_are_independent(self) -> None:
        """Each comes to both at once, in an order of its own."""
        assert explore(World([[X, Y], [X], [Y, X]], at_once=2), all_pass)


class TestRandomOrders:
    @given(
        size=st.integers(2, 64),
        rounds=st.integers(1, 3),
        at_once=st.integers(1, 3),
        choices=CHOICES,
    )
    def test_any_members_under_any_tags(
        self, size: int, rounds: int, at_once: int, choices: random.Random
    ) -> None:
        programs: list[list[Call]] = [[] for _ in range(size)]
        for number in range(rounds):
            members = choices.sample(range(size), choices.randint(1, size))
            tag = choices.choice(["tag", f"tag {number}"])
            for rank in members:
                programs[rank].append(call(tag, tuple(members)))
            for program in programs:
                program.append(ALL)
        world = World(programs, at_once=at_once)
        world.play(choices)
        all_pass(world)

    @given(
        size=st.integers(2, 24),
        give_ups=st.integers(0, 3),
        deaths=st.integers(0, 2),
        choices=CHOICES,
    )
    def test_no_member_waits_whatever_goes_wrong(
        self, size: int, give_ups: int, deaths: int, choices: random.Random
    ) -> None:
        world = World(
            [[ALL] * 3] * size, give_ups=give_ups, deaths=deaths, ticks=2 * size
        )
        world.play(choices)
        if any(member.is_dead for member in world.members):
            nobody_waits(world)
        else:
            next_one_works(world)


@given(size=st.integers(2, 64), late=st.integers(1, 5), choices=CHOICES)
def test_silence_tells_waiting_members_who_is_late(
    size: int, late: int, choices: random.Random
) -> None:
    """Those on either side of a late member, too, with whom it speaks."""
    missing = sorted(choices.sample(range(size), min(late, size - 1)))
    world = World([[ALL] * (1 + (rank not in missing)) for rank in range(size)])
    world.play(choices)
    for member in world.members:
        for series in member.calls.values():
            assert set(missing) <= set(series.missing)
            if late == 1:
                assert series.missing == missing


class TestNewLives:
    @given(size=st.integers(2, 8), count=st.integers(1, 6), choices=CHOICES)
    def test_a_restarted_member_is_in_step_again(
        self, size: int, count: int, choices: random.Random
    ) -> None:
        """Also if it comes before the others know that its former life is over.

        Then it may fail with them, or be the first to come to their next one.
        """
        world = World([[ALL] * count] * size)
        world.play(choices)
        for member in world.members:
            member.program.append(ALL)
        world.restart(choices.randrange(size), [ALL])
        world.play(choices)
        for member in world.members:
            if not member.calls:
                member.program.append(ALL)
        world.play(choices)
        last = last_ends(world)
        assert all(isinstance(end, tuple) and end == last[0] for end in last)

    @given(size=st.integers(2, 12), count=st.integers(1, 6), choices=CHOICES)
    def test_forgetful_members_go_on_at_the_round_of_the_others(
        self, size: int, count: int, choices: random.Random
    ) -> None:
        world = World([[ALL] * count] * size)
        world.play(choices)
        for rank in choices.sample(range(size), choices.randint(1, size - 1)):
            world.restart(rank, [])
        world.settle()  # those that are left hear of it before they go on
        for member in world.members:
            member.program.append(ALL)
        world.budgets["tick"] = size
        world.play(choices)
        last = last_ends(world)
        assert all(isinstance(end, tuple) and end == last[0] for end in last)


LATE = Failure(Blame.GAVE_UP, "it gave up", (5,))


def here(
    number: int, passed: int, latest: int, known: int, *, waits: bool = True
) -> KnownArrivals:
    return KnownArrivals(ALL, number, passed, waits, latest, known)


class TestOneMember:
    """The root of three, unless said otherwise; its children are 1 and 2."""

    def table_and_series(
        self, rank: int = 0, size: int = 3
    ) -> tuple[SeriesTable, Series]:
        series_table = SeriesTable(rank, size, name_of)
        return series_table, series_table.series(ALL)

    def messages(self, series_table: SeriesTable) -> list[tuple[int, SeriesNotice]]:
        return [
            (rank, message)
            for series, rank in series_table.due()
            for message in series.notices_for(rank)
        ]

    def test_a_result_is_kept_for_an_unreachable_child(self) -> None:
        series_table, series = self.table_and_series()
        series_table.join(series, is_marked=True)
        for rank in (1, 2):
            series_table.receive(rank, Report(ALL, 0, -1, is_marked=False))
        series.let_go()
        assert series.is_busy
        series_table.join(series)
        result = Result(ALL, 0, is_marked=True)
        assert series.notices_for(1) == [result, here(1, 0, 1, 1)]
        series.on_lost(2, LATE)
        assert series.failure is LATE
        assert series.notices_for(2) == [RoundFailed(ALL, 1, 0, LATE)]

    def test_a_result_goes_before_other_news(self) -> None:
        series_table, series = self.table_and_series()
        series_table.join(series)
        series.fail(LATE)  # and nobody could be told
        series_table.join(series)
        for rank in (1, 2):
            series_table.receive(rank, Report(ALL, 1, -1, is_marked=False))
        result = Result(ALL, 1, is_marked=False)
        assert series.notices_for(1) == [result, RoundFailed(ALL, 0, 1, LATE)]

    def test_the_last_failures_are_kept_with_their_reasons(self) -> None:
        series_table, series = self.table_and_series()
        for number in range(FAILURES_KEPT + 2):
            series_table.receive(1, RoundFailed(ALL, number, -1, LATE))
        problems = []
        for _ in range(FAILURES_KEPT + 2):
            series_table.join(series)
            assert series.failure is not None
            problems.append(series.failure.problem)
        text = "other members gave up rendezvous 1 of 'tag': they are at number 9"
        assert problems == [text.replace("1", "0", 1), text, *["it gave up"] * 8]
        series_table.join(series)
        assert series.is_waiting

    @pytest.mark.parametrize(
        "message",
        [
            here(3, 1, 3, 2),
            Report(ALL, 3, 1, is_marked=False),
            RoundFailed(ALL, 3, 1, LATE),
        ],
    )
    def test_later_round_abandons_the_earlier_one(self, message: SeriesNotice) -> None:
        series_table, series = self.table_and_series()
        for _ in range(2):
            series_table.join(series)
            series.fail(LATE)
        series_table.receive(2, here(2, 1, 2, 0, waits=False))
        series_table.join(series)
        assert (series.number, series.is_waiting) == (2, True)
        series_table.receive(1, message)
        assert series.failure is not None
        assert series.failure.problem == (
            "other members gave up rendezvous 2 of 'tag' (reported by rank 1 ('b')): "
            "they are at number 3"
        )

    def test_a_failure_is_passed_on_once_unless_it_comes_too_late(self) -> None:
        series_table, series = self.table_and_series()
        series_table.receive(1, RoundFailed(ALL, 0, -1, LATE))
        assert self.messages(series_table) == [(2, RoundFailed(ALL, 0, -1, LATE))]
        series_table.receive(2, RoundFailed(ALL, 0, -1, LATE))
        assert self.messages(series_table) == []
        series_table.receive(2, here(-1, 1, 1, 0, waits=False))
        series_table.receive(2, RoundFailed(ALL, 1, 0, LATE))
        series_table.join(series)
        assert (series.number, series.is_waiting) == (2, True)

    def test_a_report_is_sent_again_to_a_restarted_parent(self) -> None:
        """A new life of the parent; this one waits at its third meeting."""
        series_table, series = self.table_and_series(rank=1)
        for number in range(2):
            series_table.join(series)
            series_table.receive(0, Result(ALL, number, is_marked=False))
        series_table.join(series)
        series_table.due()
        assert series.notices_for(0) == [Report(ALL, 2, 1, is_marked=False)]
        series_table.receive(0, here(0, -1, 0, 1))
        assert self.messages(series_table) == [(0, here(2, 1, 2, 2))]
        series_table.receive(0, here(2, 1, 2, 1))  # it has not our report
        assert self.messages(series_table) == [(0, Report(ALL, 2, 1, is_marked=False))]

    @pytest.mark.parametrize(
        ("at", "rank", "notice"),
        [
            (0, 1, Result(ALL, 0, is_marked=False)),  # of a child
            (0, 1, WaitsElsewhere(ALL, 0, 4, TagRound(None, 0))),
            (1, 0, Report(ALL, 0, -1, is_marked=False)),  # of the parent
            (1, 0, Result(ALL, 0, is_marked=False)),  # its child has not come
        ],
    )
    def test_wrong_messages_are_refused(
        self, at: int, rank: int, notice: SeriesNotice
    ) -> None:
        series_table, series = self.table_and_series(rank=at, size=4)
        series_table.join(series)
        with pytest.raises(MalformedError):
            series_table.receive(rank, notice)

    def test_the_oldest_series_are_forgotten_unless_used(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(table, "SERIES_MAX", 2)
        series_table, first = self.table_and_series()
        assert series_table.drop() == []
        series_table.join(first)
        second, third, fourth = (
            series_table.series(call(name)) for name in ("2", "3", "4")
        )
        series_table.join(second)
        second.fail(LATE)
        assert series_table.drop() == [second, third]
        assert series_of(series_table) == [first, fourth]
        fifth = series_table.series(call("tag", (0, 1)))
        fourth.calls += 1
        assert series_table.drop(first) == [fifth]
        first.fail(LATE)
        series_table.series(call("6"))
        assert series_table.drop() == [first]


def steps_of(size: int) -> tuple[World, int]:
    """Let all come, and all messages of a moment arrive at once; count the moments."""
    world = World([[ALL]] * size)
    for rank in range(size):
        world.join(rank)
    count = 0
    while waiting := [(link, len(queue)) for link, queue in world.links.items()]:
        count += 1
        for (from_, to), number in waiting:
            for _ in range(number):
                world.deliver(from_, to)
    return world, count


@pytest.mark.parametrize("size", [*range(2, 65), 4096])
def test_depth_is_logarithmic_with_three_connections_each(size: int) -> None:
    world, steps = steps_of(size)
    ends = [member.ends[0] for member in world.members]
    assert all(end == ends[0] for end in ends)
    assert steps == 2 * (size.bit_length() - 1)
    assert world.messages == 2 * (size - 1)
    peers = [0] * size
    for pair in world.connected:
        for rank in pair:
            peers[rank] += 1
    assert max(peers) <= 3


@pytest.mark.parametrize("size", [*range(1, 65), 100, 1000, 4096])
def test_a_member_is_where_its_parent_says(size: int) -> None:
    parents: dict[int, int] = {}
    for place in range(size):
        parent, below = tree_position(place, size)
        assert parent == parents.get(place)
        branch = [place, *(rank for part in below for rank in part)]
        assert branch == list(range(place, place + len(branch)))
        parents |= {part.start: place for part in below}
    assert parents.keys() == set(range(1, size))
