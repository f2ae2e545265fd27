"""The tree of a round: binary, balanced, with every branch a contiguous range.

Members have places 0, 1, 2, ...  A branch is a range of places: its head is the first
place, and the two halves of the rest are the branches of the head's children.  So the
payloads of a branch are concatenated in order, each member has at most three
neighbours, and with n members the depth is at most floor(log2(n)).
"""

from __future__ import annotations

Branch = tuple[range, tuple[range, ...]]


def split(branch: range) -> tuple[range, ...]:
    """Return the branches of the head's children: zero, one or two ranges."""
    first, end = branch.start + 1, branch.stop
    middle = first + (end - first + 1) // 2
    return tuple(one for one in (range(first, middle), range(middle, end)) if one)


def branch_of(place: int, size: int) -> Branch:
    """Return the branch of a member, and those of its children."""
    branch = range(size)
    while branch.start != place:
        branch = next(one for one in split(branch) if place in one)
    return branch, split(branch)


def parent_of(place: int, size: int) -> int | None:
    """Return the place of a member's parent; None for the root."""
    branch, parent = range(size), None
    while branch.start != place:
        parent = branch.start
        branch = next(one for one in split(branch) if place in one)
    return parent


def are_neighbours(one: int, other: int, size: int) -> bool:
    """Return whether one of two members is the other's parent."""
    return parent_of(one, size) == other or parent_of(other, size) == one
