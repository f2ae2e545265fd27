"""Asks all workers of a group for events, references or a checkup; aligns clocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from asyncrpc.core.host.this_host import HOST_ID
from asyncrpc.core.loop.clock import NS_PER_S, Clock, wall_ns
from asyncrpc.core.members import Member
from asyncrpc.extend import Incarnation, WorkerId
from asyncrpc.tools.checkup.machine.findings import CheckFinding
from asyncrpc.tools.inspection.group import AsksWorkers, GroupAnswers, ask_all
from asyncrpc.tools.inspection.machine.spans import WorkerEvents
from asyncrpc.tools.inspection.messages import (
    CheckupSeen,
    ListReferences,
    ReadClock,
    TakeCheckup,
    TakeEvents,
)
from asyncrpc.tools.inspection.observer import Observer
from asyncrpc.tools.inspection.questions import ANSWER_S
from asyncrpc.tools.inspection.reference_records import ReferencesSeen
from asyncrpc.trace import RECENT_MAX

CLOCK_TRIES: Final = 5  # the shortest round trip tells the offset best
EVENTS_S: Final = 10.0  # for all events of one worker


async def events_of(
    observer: Observer,
    address: str,
    *,
    names: Sequence[str] = (),
    kinds: Sequence[str] = (),
    on_answer: Callable[[], None] = lambda: None,
) -> GroupAnswers[WorkerEvents]:
    """Ask the workers of a group for their last events.

    Args:
        names: of the workers to ask; empty: all.
        kinds: of events, as fields of `RecentEvents`; empty: all.
    """
    question = TakeEvents(list(kinds), RECENT_MAX)

    async def ask(asks: AsksWorkers, member: Member) -> WorkerEvents:
        offset_s, error_s = await _clock_of(asks, member)
        recent = await asks.ask(member, question, timeout_s=EVENTS_S)
        on_answer()
        worker = WorkerId(member.name, Incarnation(member.incarnation))
        return WorkerEvents(worker, recent, offset_s, error_s, member.rank)

    return await ask_all(observer, address, ask, names=names)


async def _clock_of(asks: AsksWorkers, member: Member) -> tuple[float, float]:
    """Return what to add to a worker's clock to get ours, and how wrong that may be.

    Workers of this host have the same clock.  For others, both directions are assumed
    to take the same time; the error is at most half of the round trip.

    Source: the clock filter of RFC 5905.
    """
    if member.host_id == HOST_ID:
        return 0.0, 0.0
    best = float("inf"), 0.0
    now_s = Clock().now_s
    for _ in range(CLOCK_TRIES):
        before_s = now_s()
        theirs_s = await asks.ask(member, ReadClock(), timeout_s=ANSWER_S)
        after_s = now_s()
        middle_s = (before_s + after_s) / 2
        best = min(best, (after_s - before_s, middle_s - theirs_s))
    trip_s, offset_s = best
    return offset_s, trip_s / 2


async def references_of(
    observer: Observer,
    address: str,
    *,
    names: Sequence[str] = (),
    oldest_max: int = RECENT_MAX,
) -> GroupAnswers[ReferencesSeen]:
    """Ask the workers of a group for their references; otherwise like `events_of`."""
    question = ListReferences(oldest_max)

    async def ask(asks: AsksWorkers, member: Member) -> ReferencesSeen:
        return await asks.ask(member, question, timeout_s=ANSWER_S)

    return await ask_all(observer, address, ask, names=names)


class WorkerCheckup(NamedTuple):
    """The checkup of a worker, and how its wall clock differs from ours.

    Attributes:
        ahead_s: by how much its wall clock is ahead of that of this host.
        error_s: by how much that may be wrong; 0: the worker is on this host.
    """

    findings: list[CheckFinding]
    ahead_s: float
    error_s: float


def wall_ahead_s(
    seen: CheckupSeen, offset_s: float, *, wall_s: float, clock_s: float
) -> float:
    """Return by how much the wall clock of a worker is ahead of ours, in seconds."""
    ours_s = wall_s - (clock_s - (seen.clock_s + offset_s))  # when theirs was read
    return seen.wall_ns / NS_PER_S - ours_s


async def checkups_of(
    observer: Observer, address: str, *, names: Sequence[str] = ()
) -> GroupAnswers[WorkerCheckup]:
    """Ask the workers of a group to check themselves; otherwise like `events_of`."""

    async def ask(asks: AsksWorkers, member: Member) -> WorkerCheckup:
        offset_s, error_s = await _clock_of(asks, member)
        seen = await asks.ask(member, TakeCheckup(), timeout_s=ANSWER_S)
        if not error_s:  # the same clock
            return WorkerCheckup(seen.findings, 0.0, 0.0)
        ahead_s = wall_ahead_s(
            seen, offset_s, wall_s=wall_ns() / NS_PER_S, clock_s=Clock().now_s()
        )
        return WorkerCheckup(seen.findings, ahead_s, error_s)

    return await ask_all(observer, address, ask, names=names)
