"""A worker whose numbers lies have raised, and members that did not hear of it."""

from __future__ import annotations

from dataclasses import replace

from asyncrpc.core.membership.machine.membership import STEP_MAX
from tests.unit.core.membership.machine.test_membership import (
    LOST,
    TELLER,
    record,
    table,
)


def test_worker_that_was_lied_about_becomes_known_step_by_step() -> None:
    mine = table(record("b", status=LOST))
    restarted = record("b", 2, 2, 3 * STEP_MAX + 1)
    for number in range(1, 4):
        mine.receive(restarted, 1.0, by=TELLER)
        assert mine.get("b") == replace(restarted, version=number * STEP_MAX)
    mine.receive(restarted, 1.0, by=TELLER)
    assert mine.get("b") == restarted
