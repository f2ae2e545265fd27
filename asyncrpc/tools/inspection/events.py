"""The last events of each kind that a worker remembers, in the form that is sent."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from asyncrpc.core.trace.events import (
    BackwardPassEnded,
    BackwardSegmentEnded,
    BucketReduced,
    CallEnded,
    CallServed,
    CollectiveEnded,
    LinkChanged,
    MembershipChanged,
    MemoryChanged,
    OptimizerStepEnded,
    ReferenceChanged,
    StreamReceived,
    StreamSent,
)


class NamedTask(NamedTuple):
    """A task that runs."""

    name: str
    coroutine: str


class RecentEvents(NamedTuple):
    """The last events of one worker; fields as in `trace.FlightRecorder`.

    Attributes:
        now_s: the time by its clock, which all events use.
        wall_ns: the same moment, in nanoseconds since 1970.
        tasks: the running tasks that these events name.
    """

    now_s: float
    wall_ns: int
    tasks: list[NamedTask]
    calls: list[CallEnded]
    served: list[CallServed]
    received: list[StreamReceived]
    sent: list[StreamSent]
    references: list[ReferenceChanged]
    passes: list[BackwardPassEnded]
    segments: list[BackwardSegmentEnded]
    steps: list[OptimizerStepEnded]
    collectives: list[CollectiveEnded]
    buckets: list[BucketReduced]
    links: list[LinkChanged]
    membership: list[MembershipChanged]
    memory: list[MemoryChanged]


KIND_NAMES: Final = RecentEvents._fields[3:]
OWN: Final = "inspection."  # begins the names of the calls that look at workers


def is_own(call: Any) -> bool:
    """Return whether a call, or an event, is of the inspection itself."""
    function: str = getattr(call, "function", "")
    return function.startswith(OWN)
