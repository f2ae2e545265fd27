"""Nobody passes before all have come, nobody waits for ever, and the next one works.

The members and their links are played; of a few members in every possible order.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrpc.core.rounds.machine import table
from asyncrpc.core.rounds.machine.messages import (
    Blame,
    Failure,
    KnownArrivals,
    Report,
    Result,
    RoundFailed,
    RoundMessage,
    TagRound,
    WaitsElsewhere,
)
from asyncrpc.core.rounds.machine.series import FAILURES_KEPT, Series
from asyncrpc.core.rounds.machine.table import Rounds
from asyncrpc.errors import MalformedError
from tests.inner_state import series_of
from tests.unit.core.rounds.machine.world import (
    Call,
    Passed,
    Step,
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


class TestEveryOrder:
    @pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
    def test_all_members_pass_when_all_have_come(self, size: int) -> None:
        assert explore(World([[ALL]] * size), all_pass)

    @pytest.mark.parametrize("size", [2, 3])
    def test_two_rounds_in_a_row_are_passed(self, size: int) -> None:
        assert explore(World([[ALL] * 2] * size), all_pass)

    @pytest.mark.parametrize("size", [2, 3])
    def test_messages_of_a_silence_do_no_harm(self, size: int) -> None:
        assert explore(World([[ALL]] * size, ticks=2), all_pass)

    @pytest.mark.parametrize("size", [2, 3])
    def test_member_that_gives_up_fails_this_round_only(self, size: int) -> None:
        assert explore(World([[ALL]] * size, give_ups=1), next_one_works)

    def test_two_members_may_give_up(self) -> None:
        assert explore(World([[ALL]] * 3, give_ups=2), next_one_works)

    def test_member_that_gives_up_may_be_ahead(self) -> None:
        assert explore(World([[ALL] * 3] * 2, give_ups=2), next_one_works)

    @pytest.mark.parametrize("size", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
    def test_dead_member_is_not_awaited(self, size: int) -> None:
        assert explore(World([[ALL]] * size, deaths=1), nobody_waits)

    def test_two_dead_members_are_not_awaited(self) -> None:
        assert explore(World([[ALL]] * 3, deaths=2), nobody_waits)

    @pytest.mark.slow
    def test_member_that_dies_while_another_gives_up_is_not_awaited(self) -> None:
        assert explore(World([[ALL]] * 3, deaths=1, give_ups=1), nobody_waits)

    @pytest.mark.slow
    @pytest.mark.parametrize("ticks", [0, 1])
    def test_four_members_survive_a_give_up(self, ticks: int) -> None:
        size = 4 - ticks
        assert explore(World([[ALL]] * size, give_ups=1, ticks=ticks), next_one_works)

    @pytest.mark.slow
    def test_three_members_may_meet_twice(self) -> None:
        assert explore(World([[ALL] * 2] * 3, give_ups=1), next_one_works)
        assert explore(World([[ALL] * 2] * 3, deaths=1), nobody_waits)


def played(
    size: int, pick: Callable[[list[Step]], Step], loss: int, victim: int
) -> bool:
    """Play one order in which a member dies after so many steps; say if it did."""
    world = World([[ALL] * 2] * size, deaths=1, ticks=size)
    for number in itertools.count():
        if number == loss and not world.members[victim].is_dead:
            world.take(("die", victim, 0))
        steps = [step for step in world.steps() if step[0] != "die"]
        if not steps:
            world.settle()
            nobody_waits(world)
            return number > loss
        world.take(pick(steps))
    raise AssertionError


class TestALossAtEachStep:
    """Of up to five, in several orders: nobody waits for whom was lost at any step."""

    @pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
    @pytest.mark.parametrize(
        "pick",
        [
            pytest.param(lambda steps: steps[0], id="all come first"),
            pytest.param(lambda steps: steps[-1], id="messages come first"),
            pytest.param(lambda steps: steps[len(steps) // 2], id="by turns"),
        ],
    )
    def test_lost_member_is_not_awaited_at_any_step(
        self, size: int, pick: Callable[[list[Step]], Step]
    ) -> None:
        for victim in range(size):
            steps = itertools.count()
            while played(size, pick, next(steps), victim):
                pass
            assert next(steps) >= size


class TestSubsets:
    @pytest.mark.parametrize("ticks", [0, 1])
    def test_rounds_of_different_members_may_share_a_tag(self, ticks: int) -> None:
        """Although the third member waits for the others while they are elsewhere."""
        some: list[Call] = [call("tag", (1, 0)), ALL]
        assert explore(World([some, some, [ALL]], ticks=ticks), all_pass)

    def test_rounds_of_other_tags_are_independent(self) -> None:
        """Each comes to both at once, in an order of its own."""
        programs: list[list[Call]] = [
            [call("x"), call("y", (2, 0))],
            [call("x")],
            [call("y", (2, 0)), call("x")],
        ]
        assert explore(World(programs, at_once=2), all_pass)

    def test_given_up_round_leaves_other_tags_alone(self) -> None:
        world = World([[call("x"), call("y")]] * 2, at_once=2)
        for rank in (0, 0, 1):
            world.take(("come", rank, 0))
        world.members[0].calls[0].fail(Failure(Blame.GAVE_UP, "it had no time"))
        world.settle()
        nobody_waits(world)
        for member in world.members:
            assert isinstance(member.ends[0], Failure)
            assert isinstance(member.ends[1], tuple)

    @given(
        size=st.integers(2, 64),
        rounds=st.integers(1, 3),
        at_once=st.integers(1, 3),
        choices=CHOICES,
    )
    def test_rounds_of_any_members_and_tags_pass(
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
    def test_rounds_survive_give_ups_and_deaths_at_any_time(
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
def test_silence_reveals_the_late_members_to_all_that_wait(
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
    def test_restarted_member_is_in_step_again(
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
    def test_members_without_memory_continue_with_the_others(
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
    return KnownArrivals(number, passed, waits, latest, known)


class TestOneMember:
    """The root of three, unless said otherwise; its children are 1 and 2."""

    def new_series(self, rank: int = 0, size: int = 3) -> tuple[Rounds, Series]:
        rounds = Rounds(rank, size, name_of)
        return rounds, rounds.series(ALL)

    def messages(self, rounds: Rounds) -> list[tuple[int, RoundMessage]]:
        return [
            (rank, message)
            for series, rank in rounds.due()
            for message in series.messages_for(rank)
        ]

    def test_round_passes_with_the_last_report(self) -> None:
        rounds, series = self.new_series()
        rounds.join(series)
        rounds.receive(series, 2, Report(0, -1, is_marked=True))
        assert (series.is_waiting, series.missing) == (True, [1])
        rounds.receive(series, 1, Report(0, -1, is_marked=False))
        result = Result(0, is_marked=True)
        assert self.messages(rounds) == [(1, result), (2, result)]
        series.let_go()
        assert not series.has_passed
        assert not series.is_busy

    def test_result_is_kept_for_members_not_yet_told(self) -> None:
        rounds, series = self.new_series()
        rounds.join(series, is_marked=True)
        for rank in (1, 2):
            rounds.receive(series, rank, Report(0, -1, is_marked=False))
        series.let_go()
        assert series.is_busy
        rounds.join(series)
        result = Result(0, is_marked=True)
        assert series.messages_for(1) == [result, here(1, 0, 1, 1)]
        series.on_lost(2, LATE)
        assert series.failure is LATE
        assert series.messages_for(2) == [RoundFailed(1, 0, LATE)]

    def test_result_is_sent_before_the_failure_of_an_earlier_round(self) -> None:
        rounds, series = self.new_series()
        rounds.join(series)
        series.fail(LATE)  # and nobody could be told
        rounds.join(series)
        for rank in (1, 2):
            rounds.receive(series, rank, Report(1, -1, is_marked=False))
        result = Result(1, is_marked=False)
        assert series.messages_for(1) == [result, RoundFailed(0, 1, LATE)]

    def test_last_failures_are_kept_with_their_reasons(self) -> None:
        rounds, series = self.new_series()
        for number in range(FAILURES_KEPT + 2):
            rounds.receive(series, 1, RoundFailed(number, -1, LATE))
        problems = []
        for _ in range(FAILURES_KEPT + 2):
            rounds.join(series)
            assert series.failure is not None
            problems.append(series.failure.problem)
        text = "other members gave up rendezvous 1 of 'tag': they are at number 9"
        assert problems == [text.replace("1", "0", 1), text, *["it gave up"] * 8]
        rounds.join(series)
        assert series.is_waiting

    @pytest.mark.parametrize(
        "message",
        [here(3, 1, 3, 2), Report(3, 1, is_marked=False), RoundFailed(3, 1, LATE)],
    )
    def test_later_round_abandons_earlier_one(self, message: RoundMessage) -> None:
        rounds, series = self.new_series()
        for _ in range(2):
            rounds.join(series)
            series.fail(LATE)
        rounds.receive(series, 2, here(2, 1, 2, 0, waits=False))
        rounds.join(series)
        assert (series.number, series.is_waiting) == (2, True)
        rounds.receive(series, 1, message)
        assert series.failure is not None
        assert series.failure.problem == (
            "other members gave up rendezvous 2 of 'tag' (reported by rank 1 ('b')): "
            "they are at number 3"
        )

    def test_member_waiting_at_a_failed_round_learns_the_reason(self) -> None:
        rounds, series = self.new_series()
        rounds.join(series)
        series.fail(LATE)
        rounds.due()
        series.messages_for(1)
        rounds.receive(series, 1, Report(0, -1, is_marked=False))
        assert self.messages(rounds) == [(1, RoundFailed(0, -1, LATE))]

    def test_failure_is_passed_on_once_and_late_ones_are_ignored(self) -> None:
        rounds, series = self.new_series()
        rounds.receive(series, 1, RoundFailed(0, -1, LATE))
        assert self.messages(rounds) == [(2, RoundFailed(0, -1, LATE))]
        rounds.receive(series, 2, RoundFailed(0, -1, LATE))
        assert self.messages(rounds) == []
        rounds.receive(series, 2, here(-1, 1, 1, 0, waits=False))
        rounds.receive(series, 2, RoundFailed(1, 0, LATE))
        rounds.join(series)
        assert (series.number, series.is_waiting) == (2, True)

    def test_restarted_parent_learns_the_round_of_its_child(self) -> None:
        """A new life of the parent; this one waits at its third meeting."""
        rounds, series = self.new_series(rank=1)
        for number in range(2):
            rounds.join(series)
            rounds.receive(series, 0, Result(number, is_marked=False))
        rounds.join(series)
        rounds.due()
        assert series.messages_for(0) == [Report(2, 1, is_marked=False)]
        rounds.receive(series, 0, here(0, -1, 0, 1))
        assert self.messages(rounds) == [(0, here(2, 1, 2, 2))]
        rounds.receive(series, 0, here(2, 1, 2, 1))  # it has not our report
        assert self.messages(rounds) == [(0, Report(2, 1, is_marked=False))]

    def test_lost_member_fails_the_round_it_has_come_to(self) -> None:
        """Also if this one has not come: its payload is one of a dead member."""
        rounds, series = self.new_series()
        rounds.receive(series, 1, Report(0, -1, is_marked=False))
        series.on_lost(2, LATE)
        assert not self.messages(rounds)
        series.on_lost(1, LATE)
        assert {rank for rank, _ in self.messages(rounds)} == {1, 2}
        rounds.join(series)
        assert series.failure is LATE

    def test_doubt_about_a_member_that_has_come_is_ignored(self) -> None:
        rounds, series = self.new_series(size=4)
        some = rounds.series(call("tag", (0, 3)))
        rounds.join(series)
        rounds.receive(series, 1, here(0, -1, 0, 0b1110))
        rounds.receive(series, 1, WaitsElsewhere(0, 3, TagRound((0, 3), 0)))
        assert series.is_waiting
        rounds.join(some)
        rounds.receive(series, 3, WaitsElsewhere(0, 2, TagRound((0, 3), 0)))
        assert series.is_waiting

    @pytest.mark.parametrize(
        ("rank", "message"),
        [
            (3, here(0, -1, 0, 1)),
            (1, Result(0, is_marked=False)),
            (1, WaitsElsewhere(0, 3, TagRound(None, 0))),
        ],
    )
    def test_impossible_message_is_refused(
        self, rank: int, message: RoundMessage
    ) -> None:
        rounds, series = self.new_series()
        with pytest.raises(MalformedError):
            rounds.receive(series, rank, message)

    @pytest.mark.parametrize(
        "message", [Report(0, -1, is_marked=False), Result(0, is_marked=False)]
    )
    def test_report_or_early_result_of_a_parent_is_refused(
        self, message: RoundMessage
    ) -> None:
        rounds, series = self.new_series(rank=1, size=4)
        rounds.join(series)  # its child has not come
        with pytest.raises(MalformedError):
            rounds.receive(series, 0, message)

    def test_oldest_unused_series_are_dropped(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(table, "SERIES_MAX", 2)
        rounds, first = self.new_series()
        assert rounds.drop([]) == []
        rounds.join(first)
        second, third, fourth = (rounds.series(call(name)) for name in ("2", "3", "4"))
        rounds.join(second)
        second.fail(LATE)
        assert rounds.drop([]) == [second, third]
        assert series_of(rounds) == [first, fourth]
        fifth = rounds.series(call("tag", (0, 1)))
        assert rounds.drop([fourth]) == [fifth]
        first.fail(LATE)
        rounds.series(call("6"))
        assert rounds.drop([]) == [first]


def rounds_of(size: int, key: Call) -> tuple[World, int]:
    """Let all come, and all messages of a moment arrive at once; count the moments."""
    world = World([[key]] * size)
    for rank in range(size):
        world.join(rank)
    count = 0
    while waiting := [
        (link, len(queue)) for link, queue in world.links.items() if queue
    ]:
        count += 1
        for (from_, to), number in waiting:
            for _ in range(number):
                world.deliver(from_, to)
    return world, count


@pytest.mark.parametrize("size", [*range(2, 65), 4096])
def test_depth_messages_and_connections_grow_logarithmically(size: int) -> None:
    world, rounds = rounds_of(size, ALL)
    ends = [member.ends[0] for member in world.members]
    assert all(end == ends[0] for end in ends)
    assert rounds == 2 * (size.bit_length() - 1)
    assert world.messages == 2 * (size - 1)
    peers: dict[int, set[int]] = {rank: set() for rank in range(size)}
    for from_, to in world.connected:
        peers[from_].add(to)
        peers[to].add(from_)
    assert max(map(len, peers.values())) <= 3
