"""What a worker remembers, as it travels: its last events of each kind."""

from __future__ import annotations

from typing import Final, NamedTuple

from asyncrpc.trace.events import (
    BackwardPassEnded,
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


class RecentEvents(NamedTuple):
    """The last events of one worker; fields as those of `trace.FlightRecorder`.

    Attributes:
        now_s: the time by its clock, that of all events.
        wall_ns: the same moment, in nanoseconds since 1970.
    """

    now_s: float
    wall_ns: int
    calls: list[CallEnded]
    served: list[CallServed]
    received: list[StreamReceived]
    sent: list[StreamSent]
    references: list[ReferenceChanged]
    passes: list[BackwardPassEnded]
    steps: list[OptimizerStepEnded]
    collectives: list[CollectiveEnded]
    buckets: list[BucketReduced]
    links: list[LinkChanged]
    membership: list[MembershipChanged]
    memory: list[MemoryChanged]


KIND_NAMES: Final = RecentEvents._fields[2:]
