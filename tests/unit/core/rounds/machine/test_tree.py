"""Every branch is a range, and everything about the tree is logarithmic."""

from __future__ import annotations

import pytest

from asyncrpc.core.rounds.machine.tree import branch_of, parent_of, split


def depth_of(place: int, size: int) -> int:
    """Return the number of steps from the root to a member."""
    depth, above = 0, parent_of(place, size)
    while above is not None:
        depth, above = depth + 1, parent_of(above, size)
    return depth


@pytest.mark.parametrize("size", [*range(1, 65), 100, 1000, 4096])
def test_parent_and_child_agree_on_the_place_of_a_member(size: int) -> None:
    seen: set[int] = set()
    for place in range(size):
        branch, below = branch_of(place, size)
        assert branch.start == place
        assert split(branch) == below
        assert [branch.start, *(place for part in below for place in part)] == list(
            branch
        )
        assert [parent_of(part.start, size) for part in below] == [place] * len(below)
        seen.update(part.start for part in below)
    assert parent_of(0, size) is None
    assert seen == set(range(1, size))


@pytest.mark.parametrize("size", [*range(1, 65), 100, 1000, 4095, 4096, 4097])
def test_depth_is_logarithmic_and_neighbours_are_three_at_most(size: int) -> None:
    depths = [depth_of(place, size) for place in range(size)]
    assert max(depths) == size.bit_length() - 1
    for place in range(size):
        _, below = branch_of(place, size)
        assert len(below) + (parent_of(place, size) is not None) <= 3
        halves = [len(part) for part in below]
        assert not halves or max(halves) - (0 if len(halves) < 2 else min(halves)) <= 1
