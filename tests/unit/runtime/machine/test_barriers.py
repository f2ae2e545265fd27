"""Nobody passes a barrier before all have come; who fails at one is alone with nobody.

Workers and their links are played: words come late and in any order between two
workers' links, in order on each.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrpc.runtime.machine.barriers import Barriers, Blame, Failure

LATE = Failure(Blame.LATE, "it gave up", ("somebody",))
LOST = Failure(Blame.LOST, "it is gone", ("somebody",))
STEPS_MAX = 4000


class World:
    """Workers that come to barriers, give them up, and go on to the next."""

    def __init__(self, size: int, barriers: int, gives_up: float) -> None:
        self.size = size
        self.barriers = barriers
        self.gives_up = gives_up  # how probable it is, at each step
        self.machines = [Barriers(rank, size) for rank in range(size)]
        self.links: dict[tuple[int, int], list[tuple[object, ...]]] = {}
        self.came = [0] * size
        self.ended: list[list[bool]] = [[] for _ in range(size)]  # passed, by number

    def step(self, choices: random.Random) -> bool:
        """Let something happen; say whether anything could."""
        coming = [
            rank
            for rank, one in enumerate(self.machines)
            if not one.is_waiting and one.number + 1 < self.barriers
        ]
        waiting = [rank for rank, one in enumerate(self.machines) if one.is_waiting]
        links = [link for link, queue in self.links.items() if queue]
        if waiting and choices.random() < self.gives_up:
            self.fail(choices.choice(waiting))
        elif links and (not coming or choices.random() < 0.7):
            self.deliver(*choices.choice(links))
        elif coming:
            self.come(choices.choice(coming))
        else:
            self.tell_overdue()
            return any(self.links.values())
        return True

    def come(self, rank: int) -> None:
        self.came[rank] += 1
        self.machines[rank].come()
        self.after(rank, was_waiting=True)

    def fail(self, rank: int) -> None:
        self.machines[rank].fail(LATE)
        self.after(rank, was_waiting=True)

    def deliver(self, from_: int, to: int) -> None:
        word = self.links[from_, to].pop(0)
        one = self.machines[to]
        was_waiting = one.is_waiting
        if word[0] == "failed":
            one.hear_failure(*word[1:])  # type: ignore[arg-type]
        elif one.hear(*word[1:]):  # type: ignore[arg-type]
            self.say(to, from_)
        self.after(to, was_waiting=was_waiting)

    def after(self, rank: int, *, was_waiting: bool) -> None:
        one = self.machines[rank]
        if was_waiting and not one.is_waiting:
            self.ended[rank].append(one.failure is None)
            if one.failure is None:
                assert min(self.came) > one.number, "passed before all had come"
            else:
                for to in range(self.size):
                    self.say(rank, to)
        for to in one.due():
            self.say(rank, to)

    def tell_overdue(self) -> None:
        for rank, one in enumerate(self.machines):
            for to in one.overdue():
                self.say(rank, to)

    def say(self, rank: int, to: int) -> None:
        if rank == to:
            return
        one = self.machines[rank]
        word: tuple[object, ...] = ("here", one.number, one.passed, one.known)
        if one.failure is not None:
            word = ("failed", one.number, one.failure)
        self.links.setdefault((rank, to), []).append(word)


def play(world: World, choices: random.Random) -> None:
    for _ in range(STEPS_MAX):
        if not world.step(choices):
            return
    raise AssertionError("it does not come to an end")


@given(
    size=st.integers(1, 9),
    barriers=st.integers(1, 4),
    choices=st.randoms(use_true_random=False),
)
def test_all_pass_every_barrier_and_nobody_before_the_last_has_come(
    size: int, barriers: int, choices: random.Random
) -> None:
    world = World(size, barriers, gives_up=0.0)
    play(world, choices)
    assert world.ended == [[True] * barriers] * size


@given(
    size=st.integers(2, 7),
    choices=st.randoms(use_true_random=False),
)
def test_whoever_gives_up_all_end_and_stay_in_step(
    size: int, choices: random.Random
) -> None:
    """Each comes to as many barriers; the last, which nobody gives up, is passed."""
    world = World(size, 4, gives_up=0.05)
    play(world, choices)
    assert [len(one) for one in world.ended] == [4] * size
    world.barriers, world.gives_up = 6, 0.0
    play(world, choices)
    assert [one[4:] for one in world.ended] == [[True, True]] * size


class TestOneWorker:
    def test_one_that_comes_to_what_others_have_left_fails_at_once(self) -> None:
        late = Barriers(0, 3)
        late.hear(2, -1, 0b110)
        for number in (0, 1):
            late.come()
            assert late.number == number
            assert late.failure is not None
            assert "they are at 2" in late.failure.problem
            assert late.due() == []
        late.come()
        assert late.is_waiting is False
        assert late.passed == 2

    def test_a_failure_that_is_told_ahead_is_kept_for_its_barrier(self) -> None:
        late = Barriers(0, 2)
        late.hear_failure(1, LATE)
        late.come()
        assert late.failure is not None
        assert late.failure is not LATE
        late.come()
        assert late.failure is LATE
        late.come()
        assert late.is_waiting

    def test_to_hear_that_it_has_been_passed_is_to_pass(self) -> None:
        one = Barriers(0, 4)
        one.come()
        assert not one.has_passed
        one.hear(1, 0, 0b10)
        assert one.has_passed
        one.come()
        assert one.known == 0b11

    def test_who_is_behind_must_be_told(self) -> None:
        one = Barriers(0, 2)
        one.come()
        assert one.hear(0, -1, 0b10) is True  # it waits at what is passed just now
        assert one.hear(0, 0, 0b11) is False
        one.come()
        assert one.hear(0, -1, 0b10) is True
        assert one.hear(1, 0, 0) is False
        one.fail(LATE)
        assert one.hear(1, 0, 0b10) is True

    def test_the_loss_of_one_that_has_come_fails_nobody(self) -> None:
        one = Barriers(0, 3)
        one.come()
        one.hear(0, -1, 0b10)
        one.on_lost(1, LOST)
        assert one.is_waiting
        one.on_lost(2, LOST)
        assert one.failure is LOST
        one.on_lost(2, LATE)
        assert one.failure is LOST

    @pytest.mark.parametrize("number", [0, 1, 5])
    def test_a_failure_ends_the_barrier_that_it_waits_at(self, number: int) -> None:
        one = Barriers(0, 2)
        one.come()
        one.hear_failure(number, LATE)
        assert not one.is_waiting
        assert one.failure is not None
        assert (one.failure is LATE) == (number == 0)

    def test_an_old_failure_does_not(self) -> None:
        one = Barriers(0, 2)
        for _ in range(2):
            one.come()
            one.fail(LATE)
        one.come()
        one.hear_failure(1, LATE)
        assert one.is_waiting
        assert one.due() == [1]
        assert one.overdue() == []  # it has told all that it knows
        assert one.awaited() == [1]

    def test_of_failures_ahead_the_latest_is_kept(self) -> None:
        late = Barriers(0, 2)
        late.hear_failure(2, LATE)
        late.hear_failure(1, LOST)
        failures = []
        for _ in range(3):
            late.come()
            failures.append(late.failure)
        assert failures[2] is LATE
        assert all(one is not None and "given" in one.problem for one in failures[:2])

    def test_it_says_who_is_missing_and_what_it_gave_up_is_over(self) -> None:
        one = Barriers(0, 3)
        one.come()
        one.hear(0, -1, 0b10)
        assert one.missing == [2]
        one.fail(LATE)
        one.fail(LOST)
        one.hear(1, -1, 0b10)
        one.hear(2, -1, 0b100)
        one.hear(1, -1, 0b10)
        one.on_lost(2, LOST)
        assert one.failure is LATE
        assert one.awaited() == one.due() == []

    def test_who_is_further_on_and_has_not_passed_has_given_up(self) -> None:
        one = Barriers(0, 3)
        one.come()
        one.hear(1, -1, 0b10)
        assert one.failure is not None
        assert "given barrier 0 up: they are at 1" in one.failure.problem
        one.come()
        assert one.known == 0b11
