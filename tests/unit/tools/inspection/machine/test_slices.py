"""Work in slices: no more than so much at once, and all of it in the end."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from itertools import pairwise

import pytest

from asyncrpc.tools.inspection.machine.slices import (
    SLICE_MAX,
    Slices,
    finished,
    let_go,
    parts_of,
    weighed_parts,
)


def test_finished_slices_return_the_result() -> None:
    def work() -> Slices[str]:
        yield 1
        yield 2
        return "done"

    assert finished(work()) == "done"


@pytest.mark.parametrize("count", [0, 1, 2, 3, SLICE_MAX, SLICE_MAX + 1, 2000])
@pytest.mark.parametrize("at_most", [1, 2, 3, SLICE_MAX])
def test_slices_have_all_items_in_order(count: int, at_most: int) -> None:
    parts = list(parts_of(range(count), at_most))
    assert [item for part in parts for item in part] == list(range(count))
    assert all(len(part) == at_most for part in parts[:-1])
    assert all(parts)


@pytest.mark.parametrize("at_most", [1, 5, 10, 100])
def test_weighed_slices_stay_within_their_limit(at_most: int) -> None:
    weights = [0, 1, 9, 3, 3, 3, 1, 200, 0, 0, 5, 5, 11]
    parts = list(weighed_parts(range(len(weights)), weights.__getitem__, at_most))
    assert [item for part, _ in parts for item in part] == list(range(len(weights)))
    for part, weight in parts:
        assert weight == sum(max(1, weights[item]) for item in part)
        assert weight <= at_most or len(part) == 1
    for (_, weight), (after, _) in pairwise(parts):
        assert weight + max(1, weights[after[0]]) > at_most  # none is too small


def test_empty_list_has_no_weighed_slice() -> None:
    assert list(weighed_parts([], lambda _: 1)) == []


class Thing:
    """Something that is freed."""


@pytest.mark.parametrize("kind", [list, set, dict])
@pytest.mark.parametrize("count", [0, 1, 7, 20, 21])
def test_items_are_freed_a_slice_at_a_time(kind: type, count: int) -> None:
    at_most = 7

    def references() -> Iterator[weakref.ref[Thing]]:
        for _ in range(count):
            thing = Thing()
            if kind is list:
                a_list.append(thing)
            elif kind is set:
                a_set.add(thing)
            else:
                a_dict[thing] = thing
            yield weakref.ref(thing)

    a_list, a_set, a_dict = list[Thing](), set[Thing](), dict[Thing, Thing]()
    left = list(references())
    things = a_list if kind is list else a_set if kind is set else a_dict
    alive = count
    for step in let_go(things, at_most):
        assert step == min(at_most, alive)
        alive -= step
        assert sum(reference() is not None for reference in left) == alive
    assert alive == 0
    assert not things
