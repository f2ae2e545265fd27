"""Everyone learns of everyone in few words, and by whatever way is left."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrpc.runtime.rounds.machine.gathering import Gathering, mask_of, ranks_of

Word = tuple[int, int, int]  # to whom, who is known, who has a mark


def words(one: Gathering, ranks: list[int]) -> list[Word]:
    return [(to, one.known, one.marked) for to in ranks]


def gather(
    members: list[int], late: set[int], choices: random.Random
) -> tuple[dict[int, Gathering], int]:
    """Let all but the late ones come, in any order; return how many words it took."""
    all_ = {rank: Gathering(rank, members) for rank in members}
    coming = [rank for rank in members if rank not in late]
    on_the_way: list[Word] = []
    count = 0
    while coming or on_the_way:
        if coming and (not on_the_way or choices.random() < 0.3):
            rank = coming.pop(choices.randrange(len(coming)))
            all_[rank].come(marked=rank % 3 == 0)
        else:
            index = choices.randrange(len(on_the_way))
            rank, known, marked = on_the_way.pop(index)
            all_[rank].merge(known, marked)
        due = words(all_[rank], all_[rank].due())
        count += len(due)
        on_the_way += due
    return all_, count


@given(
    members=st.lists(st.integers(0, 200), min_size=1, max_size=40, unique=True),
    choices=st.randoms(use_true_random=False),
)
def test_everyone_learns_of_everyone_and_of_every_mark(
    members: list[int], choices: random.Random
) -> None:
    members.sort()
    all_, count = gather(members, set(), choices)
    marked = mask_of(rank for rank in members if rank % 3 == 0)
    assert all(one.is_whole and one.marked == marked for one in all_.values())
    assert count == len(members) * (len(members) - 1).bit_length()


@given(
    size=st.integers(2, 40),
    late=st.sets(st.integers(0, 39), max_size=6),
    choices=st.randoms(use_true_random=False),
)
def test_after_a_silence_those_who_wait_know_who_is_late(
    size: int, late: set[int], choices: random.Random
) -> None:
    """Unless so many are late that no way is left between two that are not."""
    late &= set(range(size))
    all_, _ = gather(list(range(size)), late, choices)
    while told := [word for one in all_.values() for word in words(one, one.overdue())]:
        for to, known, marked in told:
            all_[to].merge(known, marked)
    for rank, one in all_.items():
        if rank in late:
            assert not one.has_come
            assert one.due() == one.overdue() == []
            continue
        assert late <= set(one.missing)
        if len(late) < (size - 1).bit_length():
            assert set(one.missing) == late


def test_one_that_is_late_ends_it_when_it_comes() -> None:
    all_, _ = gather(list(range(5)), {3}, random.Random(1))
    assert not any(one.is_whole for one in all_.values())
    all_[3].come(marked=True)
    pending = words(all_[3], all_[3].due())
    while pending:
        to, known, marked = pending.pop()
        all_[to].merge(known, marked)
        pending += words(all_[to], all_[to].due())
    assert all(one.is_whole for one in all_.values())
    assert {one.marked for one in all_.values()} == {0b01001}


def test_strangers_are_not_taken_in() -> None:
    one = Gathering(1, [1, 4])
    one.merge(0b100101, 0b100101)
    assert one.known == one.marked == 0
    one.merge(0b10000, 0b00010)
    assert (one.known, one.marked) == (0b10000, 0)


def test_whom_it_hears_from_it_waits_for_until_they_have_come() -> None:
    one = Gathering(0, range(6))
    assert one.listeners == [1, 2, 4]
    assert one.awaited() == [5, 4, 2]
    one.merge(0b10000, 0)
    assert one.awaited() == [5, 2]


@pytest.mark.parametrize("ranks", [[], [0], [3, 64, 200]])
def test_ranks_and_bits(ranks: list[int]) -> None:
    assert ranks_of(mask_of(ranks)) == ranks
