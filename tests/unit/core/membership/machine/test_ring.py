"""News along the ring reach everyone, once, in few steps, over few connections."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest

from asyncrpc.core.membership.machine.membership import STEP_MAX
from asyncrpc.core.membership.machine.records import Status
from asyncrpc.core.membership.machine.ring import CIRCLE, Ring, place_of
from tests.unit.core.membership.machine.test_membership import (
    ALIVE,
    LEFT,
    LOST,
    TELLER,
    record,
    table,
)

SIZES = (1, 2, 3, 5, 16, 64, 256, 1000)


def ring_of(names: list[str]) -> Ring:
    ring = Ring()
    for name in names:
        ring.add(name)
    return ring


def names_of(size: int) -> list[str]:
    return [f"worker{number}" for number in range(size)]


def spread(ring: Ring, root: str) -> tuple[Counter[str], Counter[str], int]:
    """Play one broadcast; return messages by receiver and sender, and the steps."""
    received: Counter[str] = Counter()
    sent: Counter[str] = Counter()
    pending, steps = [(root, place_of(root))], 0
    while pending:
        after = []
        for name, limit in pending:
            routes = ring.routes(name, limit)
            sent[name] += len(routes)
            after += routes
        received.update(name for name, _ in after)
        steps += bool(after)
        pending = after
    return received, sent, steps


@pytest.mark.parametrize("size", SIZES)
def test_every_member_is_told_once(size: int) -> None:
    names = names_of(size)
    ring = ring_of(names)
    for root in names[:10]:
        received, sent, steps = spread(ring, root)
        assert received == Counter(name for name in names if name != root)
        assert sent.total() == size - 1
        assert steps <= 2 * math.log2(size) + 1
        assert max(sent.values()) <= 2 * math.log2(size) + 1


@pytest.mark.parametrize("size", [64, 256, 1000])
def test_worker_tells_its_fingers_only(size: int) -> None:
    names = names_of(size)
    ring = ring_of(names)
    for name in names[:20]:
        assert len(ring.fingers(name)) <= 2 * math.log2(size)
        fingers = set(ring.fingers(name))
        for limit in range(0, CIRCLE, CIRCLE // 50):
            assert {finger for finger, _ in ring.routes(name, limit)} <= fingers


def test_new_worker_changes_the_fingers_of_few() -> None:
    names = names_of(256)
    ring = ring_of(names)
    before = {name: ring.fingers(name) for name in names}
    ring.add("new")
    changed = [name for name in names if ring.fingers(name) != before[name]]
    assert 0 < len(changed) < 256 / 4


def test_successor_tells_the_part_of_an_unreachable_worker() -> None:
    names = names_of(100)
    ring = ring_of(names)
    root = names[0]
    (dead, limit), *rest = reversed(ring.routes(root, place_of(root)))
    before, _, _ = spread(ring, root)
    reached = Counter(name for name, _ in rest)
    for name, part in rest:
        reached += spread_from(ring, name, part)
    past = ring.route_past(dead, limit)
    assert past is not None
    reached += Counter([past[0]]) + spread_from(ring, *past)
    assert set(reached) | {dead} == set(before)


def spread_from(ring: Ring, name: str, limit: int) -> Counter[str]:
    received: Counter[str] = Counter()
    routes = [(name, limit)]
    while routes:
        routes = [route for name in routes for route in ring.routes(*name)]
        received.update(name for name, _ in routes)
    return received


def test_last_worker_has_no_substitute() -> None:
    assert ring_of(["a", "b"]).route_past("b", place_of("b") + 1) is None
    assert Ring().route_past("b", 0) is None


def test_place_is_taken_once_and_released_once() -> None:
    ring = ring_of(["a", "b", "a"])
    assert len(ring) == 2
    assert sorted(ring) == ["a", "b"]
    assert "a" in ring
    assert "c" not in ring
    ring.discard("c")
    ring.discard("a")
    ring.discard("a")
    assert list(ring) == ["b"]


def test_lone_worker_has_no_successor() -> None:
    assert not Ring().after(0)
    assert not Ring().next_to("a")
    assert not ring_of(["a"]).next_to("a")
    assert ring_of(["a"]).fingers("a") == []
    assert ring_of(["a", "b"]).next_to("a") == "b"


def test_part_may_go_around_the_circle() -> None:
    ring = Ring()
    places = sorted(names_of(20), key=place_of)
    first, last = place_of(places[0]), place_of(places[-1])
    assert ring.within(places[0], last, place_of(places[1]))
    assert not ring.within(places[5], last, place_of(places[1]))
    assert ring.within(places[5], first, first)  # the whole circle, but its beginning
    assert not ring.within(places[0], first, first)


def test_update_with_many_names_equals_single_additions() -> None:
    names = names_of(100)
    ring = ring_of(names[:60])
    ring.update(names[40:])
    ring.update(names[:3])
    assert list(ring) == list(ring_of(names))


def test_parts_of_the_circle_have_each_name_once() -> None:
    ring = ring_of(names_of(100))
    quarter = CIRCLE // 4
    parts = [ring.between(at * quarter, (at + 1) * quarter) for at in range(4)]
    assert [name for part in parts for name in part] == list(ring)
    assert all(place_of(name) // quarter == 2 for name in parts[2])
    assert ring.between(quarter, quarter) == []


@pytest.mark.parametrize("status", [ALIVE, LOST, LEFT])
@pytest.mark.parametrize("incarnation", [1, 2])
@pytest.mark.parametrize(
    ("generation", "version"),
    [(1, STEP_MAX + 1), (STEP_MAX + 2, 0), (1 << 62, 0), (1, 1 << 62)],
)
def test_hint_raises_no_number_by_much(
    status: Status, incarnation: int, generation: int, version: int
) -> None:
    mine, other = table(record("b")), table(record("b"))
    far = record("b", incarnation, generation, version, status)
    numbers = min(generation, STEP_MAX + 1), min(version, STEP_MAX)
    near = record("b", incarnation, *numbers, status)
    assert mine.receive(far, 1.0, by=TELLER) == other.receive(near, 1.0, by=TELLER)
    assert mine.get("b") == other.get("b") != record("b")
    mine.receive(record("c", incarnation, generation, version, status), 1.0, by=TELLER)
    generation, version = min(generation, STEP_MAX), min(version, STEP_MAX)
    assert mine.get("c") == record("c", incarnation, generation, version, status)


def test_worker_that_was_lied_about_becomes_known_step_by_step() -> None:
    mine = table(record("b", status=LOST))
    restarted = record("b", 2, 2, 3 * STEP_MAX + 1)
    for number in range(1, 4):
        mine.receive(restarted, 1.0, by=TELLER)
        assert mine.get("b") == replace(restarted, version=number * STEP_MAX)
    mine.receive(restarted, 1.0, by=TELLER)
    assert mine.get("b") == restarted
