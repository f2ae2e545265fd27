"""A short soak: a few thousand mixed calls leave nothing behind; see `tests.soak`."""

from __future__ import annotations

from typing import ClassVar

import pytest
import uvloop

from tests.soak.mixed import soak
from tests.soak.readings import MIB, Reading
from tests.soak.work import KINDS


class TestSoak:
    """On one kind of loop; the workers in processes have the same."""

    loops: ClassVar = {"uvloop": uvloop.new_event_loop}

    @pytest.mark.slow
    async def test_mixed_calls_leave_nothing_behind(self) -> None:
        counts: list[int] = []
        outcome = await soak(
            3000,
            warm_up_calls=1500,
            settle_s=1.0,
            method="forkserver",
            on_progress=counts.append,
        )
        assert sum(counts) >= 3000
        assert set(outcome.uses) == {kind.name for kind in KINDS}
        assert outcome.leaks == []


def test_leak_is_detected() -> None:
    before = Reading(100 * MIB, {"threads": 4, "tasks": 1})
    assert Reading(101 * MIB, {"threads": 4, "tasks": 0}).leaks_since(before) == []
    assert Reading(130 * MIB, {"threads": 5, "tasks": 1}).leaks_since(before) == [
        "threads: 4 -> 5",
        "memory: 30 MiB more",
    ]
