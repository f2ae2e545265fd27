"""The messages of inspection; docs/reference/wire-protocol.md has them all."""

from __future__ import annotations

from typing import Final, NamedTuple

from asyncrpc.ids import RRefId
from asyncrpc.inspection.events import RecentEvents
from asyncrpc.inspection.histories import CollectiveHistory
from asyncrpc.inspection.records import NoAnswer, WorkerSnapshot
from asyncrpc.inspection.summaries import WorkerSummary
from asyncrpc.runtime.messages import Request, message

SERVICE: Final = "inspection"


class SeenBeside(NamedTuple):
    """What is seen of another worker of the same host.

    Attributes:
        snapshot: of it; None if it tells nothing.
        no_answer: why it does not; None if it does.
        collectives: its last collectives; None if it tells nothing.
    """

    snapshot: WorkerSnapshot | None
    no_answer: NoAnswer | None
    collectives: CollectiveHistory | None


@message(SERVICE, "snapshot")
class TakeSnapshot(Request[WorkerSnapshot]):
    """Ask for the tasks, threads and calls of the receiver.

    Attributes:
        is_thorough: whether it is to find out what nobody can end.
    """

    is_thorough: bool


@message(SERVICE, "collectives")
class TellCollectives(Request[CollectiveHistory]):
    """Ask for the collectives of the receiver: the last ones, and those under way."""


@message(SERVICE, "summary")
class TellSummary(Request[WorkerSummary]):
    """Ask the receiver for itself in a few numbers, which it works out at once."""


@message(SERVICE, "beside")
class LookBeside(Request[SeenBeside]):
    """Ask for those of another worker of the receiver's host, whose loop is blocked.

    Attributes:
        incarnation: of that worker.
        addresses: where it listens.
    """

    incarnation: int
    addresses: list[str]


@message(SERVICE, "clock")
class ReadClock(Request[float]):
    """Ask what time it is by the receiver's clock, in seconds."""


@message(SERVICE, "events")
class TakeEvents(Request[RecentEvents]):
    """Ask for the last events of the receiver.

    Attributes:
        kinds: which, as fields of the answer; empty: all.
        newest_max: how many of each kind, the newest.
    """

    kinds: list[str]
    newest_max: int


class ReferenceSeen(NamedTuple):
    """One reference, as the owner of its value sees it, or who holds it.

    Attributes:
        rref_id: of the value.
        owner: name of the worker that has the value.
        creator: name of the worker that made the reference.
        is_owner: whether this is the owner's word.
        state: as in `RRefRecord`.
        type_name: of the value; empty while it is made, and from who holds it.
        holders: names of those that hold it, by the owner's word.
        handles: Python objects that refer to it.
        lent: messages and borrowers that rely on it.
        age_s: seconds since the worker first had it.
    """

    rref_id: RRefId
    owner: str
    creator: str
    is_owner: bool
    state: str
    type_name: str
    holders: list[str]
    handles: int
    lent: int
    age_s: float


class ReferencesSeen(NamedTuple):
    """The references of one worker.

    Attributes:
        references: the oldest.
        left_out: how many there are besides.
    """

    references: list[ReferenceSeen]
    left_out: int


@message(SERVICE, "references")
class ListReferences(Request[ReferencesSeen]):
    """Ask for the references that the receiver owns or holds.

    Attributes:
        oldest_max: how many, the oldest.
    """

    oldest_max: int
