"""What happens in a worker: events of calls, training, links and memory.

Every worker keeps the last `RECENT_MAX` events of each kind, always: a flight recorder.
An event is noted once, at the end of its operation, and holds names, times and counts,
never a value of the program.  `Worker.subscribe` hands events to a program; `asyncrpc
dump` and `asyncrpc timeline` read those of a running group.

Times are seconds, monotonic, of one clock for all workers of a process.
"""

from asyncrpc.core.trace.events import (
    CANCELLED,
    KINDS,
    OK,
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
    TraceEvent,
    call_label,
    outcome_of,
)
from asyncrpc.core.trace.recorder import FlightRecorder
from asyncrpc.core.trace.ring import RECENT_MAX, EventRing
from asyncrpc.core.trace.stage_steps import StageSpan, StageStep
from asyncrpc.core.trace.subscription import ITEMS_MAX, Subscription

__all__ = [
    "CANCELLED",
    "ITEMS_MAX",
    "KINDS",
    "OK",
    "RECENT_MAX",
    "BackwardPassEnded",
    "BackwardSegmentEnded",
    "BucketReduced",
    "CallEnded",
    "CallServed",
    "CollectiveEnded",
    "EventRing",
    "FlightRecorder",
    "LinkChanged",
    "MembershipChanged",
    "MemoryChanged",
    "OptimizerStepEnded",
    "ReferenceChanged",
    "StageSpan",
    "StageStep",
    "StreamReceived",
    "StreamSent",
    "Subscription",
    "TraceEvent",
    "call_label",
    "outcome_of",
]
