"""The messages of inspection; docs/reference/wire-protocol.md has them all."""

from __future__ import annotations

from typing import Final, NamedTuple

from asyncrpc.extend import LOOKERS, Request, message
from asyncrpc.tools.checkup.machine.findings import CheckFinding
from asyncrpc.tools.inspection.collective_records import CollectiveHistory
from asyncrpc.tools.inspection.details import CallsSeen, TrainingSeen, WorkerDetails
from asyncrpc.tools.inspection.events import RecentEvents
from asyncrpc.tools.inspection.records import NoAnswer, WorkerSnapshot
from asyncrpc.tools.inspection.reference_records import ReferencesSeen
from asyncrpc.tools.inspection.summaries import WorkerSummary

SERVICE: Final = "inspection"


class SeenBeside(NamedTuple):
    """What is seen of another worker of the same host.

    Attributes:
        snapshot: of that worker; None if it did not answer.
        no_answer: why it did not answer; None if it did.
        collectives: its last collectives; None if it did not answer.
    """

    snapshot: WorkerSnapshot | None
    no_answer: NoAnswer | None
    collectives: CollectiveHistory | None


@message(SERVICE, "snapshot", about="the receiver", by=LOOKERS)
class TakeSnapshot(Request[WorkerSnapshot]):
    """Ask for the tasks, threads and calls of the receiver.

    Attributes:
        is_thorough: whether to find waits that nothing can end.
    """

    is_thorough: bool


@message(SERVICE, "collectives", about="the receiver", by=LOOKERS)
class TellCollectives(Request[CollectiveHistory]):
    """Ask for the collectives of the receiver: the last ones, and those under way."""


@message(SERVICE, "summary", about="the receiver", by=LOOKERS)
class TellSummary(Request[WorkerSummary]):
    """Ask for the receiver's summary: a few numbers, which it computes at once."""


@message(SERVICE, "calls", about="the receiver", by=LOOKERS)
class ListCalls(Request[CallsSeen]):
    """Ask for the open calls of the receiver, made and served.

    Attributes:
        oldest_max: how many, the oldest of each link.
    """

    oldest_max: int


@message(SERVICE, "training", about="the receiver", by=LOOKERS)
class TellTraining(Request[TrainingSeen]):
    """Ask for the receiver's passes, optimizer steps, buckets and stages."""

    newest_max: int


@message(SERVICE, "details", about="the receiver", by=LOOKERS)
class TellDetails(Request[WorkerDetails]):
    """Ask for what the receiver runs on, its options, links and functions."""


@message(SERVICE, "last_collectives", about="the receiver", by=LOOKERS)
class TellLastCollectives(Request[CollectiveHistory]):
    """Ask for the receiver's open collectives, and the last ones that have ended."""

    ended_max: int


@message(SERVICE, "beside", about="a worker on the host of the receiver", by=LOOKERS)
class LookBeside(Request[SeenBeside]):
    """Ask for a look at a worker of the receiver's host whose loop is blocked."""

    incarnation: int
    addresses: list[str]


@message(SERVICE, "clock", about="the receiver", by=LOOKERS)
class ReadClock(Request[float]):
    """Ask what time it is by the receiver's clock, in seconds."""


@message(SERVICE, "events", about="the receiver", by=LOOKERS)
class TakeEvents(Request[RecentEvents]):
    """Ask for the last events of the receiver.

    Attributes:
        kinds: which, as fields of the answer; empty: all.
        newest_max: how many of each kind, the newest.
    """

    kinds: list[str]
    newest_max: int


@message(SERVICE, "references", about="the receiver", by=LOOKERS)
class ListReferences(Request[ReferencesSeen]):
    """Ask for the references that the receiver owns or holds.

    Attributes:
        oldest_max: how many, the oldest.
    """

    oldest_max: int


class CheckupSeen(NamedTuple):
    """What a worker finds of its own process and host.

    Attributes:
        clock_s: its clock, as `ReadClock` returns it.
        wall_ns: nanoseconds since 1970 by its wall clock, at the same moment.
    """

    findings: list[CheckFinding]
    clock_s: float
    wall_ns: int


@message(SERVICE, "checkup", about="the receiver", by=LOOKERS)
class TakeCheckup(Request[CheckupSeen]):
    """Ask what the checks of `asyncrpc doctor` find in the receiver's process."""
