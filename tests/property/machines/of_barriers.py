"""Rounds of a group: barriers, rendezvous and what else all members come to."""

from __future__ import annotations

import enum
from types import ModuleType
from typing import Any, Final

from asyncrpc.core.barriers.machine import series
from asyncrpc.core.barriers.messages import Key, Purpose
from tests.property.machines.spec import Machine, guards

_KEY: Final = Key(next(iter(Purpose)), "", None)


class _Table:
    """Holds the series; nobody is told anything."""

    def __init__(self) -> None:
        self.outbox: dict[Any, None] = {}


class _OneSeries:
    """A series of two members, which is led by hand.

    What brings the events about, and what follows from them, is tested with the
    protocol: tests/unit/core/barriers/machine.
    """

    def __init__(self, build: ModuleType) -> None:
        self._series: Any = build.Series(_KEY, 0, 2, _Table())

    @property
    def state(self) -> enum.Enum:
        """Where the worker is."""
        current: enum.Enum = self._series.state
        return current

    def on(self, event: enum.Enum) -> None:
        self._series._go(event)  # noqa: SLF001


SERIES: Final = Machine(
    name="A series of rounds",
    about="The state of a worker in a series of barriers or rendezvous: at no round, "
    "at a round, or past a round.",
    source=series,
    states="SeriesState",
    starts=("AWAY",),
    begin=lambda build, _: _OneSeries(build),
    stories="""
the root has all reports: AWAY -JOIN-> GATHERING -PASS-> PASSED -LEAVE-> AWAY
a member hears the result:
    AWAY -JOIN-> GATHERING -REPORT-> REPORTED -PASS-> PASSED -JOIN-> GATHERING
a report is lost with its parent's memory: REPORTED -ASK-> GATHERING -REPORT-> REPORTED
it fails before this member has reported: GATHERING -FAIL-> FAILED -LEAVE-> AWAY
it fails after this member has reported: REPORTED -FAIL-> FAILED -JOIN-> GATHERING
the others are ahead of a member that begins anew: GATHERING -CATCH_UP-> GATHERING
the others are ahead of a member that has reported: REPORTED -CATCH_UP-> GATHERING
what has passed does not fail: PASSED -FAIL-x -PASS-x -REPORT-x
what has failed does not pass: FAILED -PASS-x -FAIL-x
who is away takes no part: AWAY -REPORT-x -PASS-x -FAIL-x -LEAVE-x
who waits comes to no other round:
    GATHERING -JOIN-x -LEAVE-x -REPORT-> REPORTED -JOIN-x -LEAVE-x -REPORT-x
""",
    tests=("tests/unit/core/barriers/machine/test_series.py",),
    guards=guards(r"""
reported-member-does-not-wait:
    return self.state is GATHERING or self.state is REPORTED =>
    return self.state is GATHERING
a-result-without-this-branch-counts:
    elif self._is_branch_here:\n            self._pass =>
    elif True:\n            self._pass
a-neighbour-that-is-gone-is-waited-for:
    if neighbour is not None and self.is_waiting: => if False:
a-failure-is-not-kept-for-those-who-come-late: self._failures[number] = failure =>
"""),
)
