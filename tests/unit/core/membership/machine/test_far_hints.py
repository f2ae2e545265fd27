"""A worker whose numbers lies have raised, and members that did not hear of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from asyncrpc.core.membership.machine.membership import STEP_MAX
from asyncrpc.core.membership.machine.records import Status
from tests.unit.core.membership.machine.test_membership import (
    ALIVE,
    LEFT,
    LOST,
    TELLER,
    record,
    table,
)


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
