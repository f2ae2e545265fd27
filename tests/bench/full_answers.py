"""Answers of workers that have much to tell, for the benchmark of the dashboard.

Each worker has as many links, calls, references, passes, stages and tasks as it is
asked for, and all are in one group of collectives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

from asyncrpc.core.ids import ContextId, Incarnation, RRefId
from asyncrpc.core.loop.waits import WaitKind
from asyncrpc.tools.inspection.collective_records import (
    UNDER_WAY,
    CollectiveHistory,
    KnownGroup,
    NotedCollective,
)
from asyncrpc.tools.inspection.details import (
    RUNS,
    SENT,
    BucketRates,
    CallSeen,
    CallsSeen,
    PassUnderWay,
    StageSpanSeen,
    StageStepSeen,
    TrainingSeen,
)
from asyncrpc.tools.inspection.machine.rates import CallRates, WorkerRates
from asyncrpc.tools.inspection.messages import (
    ListCalls,
    ListReferences,
    TakeSnapshot,
    TellLastCollectives,
    TellSummary,
    TellTraining,
)
from asyncrpc.tools.inspection.records import (
    NO_ACTOR,
    ActorKind,
    CallKey,
    ObservedActor,
    OutgoingCall,
    ServedCall,
    StackFrame,
    Wait,
    WorkerSnapshot,
)
from asyncrpc.tools.inspection.reference_records import ReferenceSeen, ReferencesSeen
from asyncrpc.tools.inspection.summaries import LINKS_MAX, LinkSummary, WorkerSummary
from asyncrpc.trace import OK, BackwardPassEnded, OptimizerStepEnded

T = TypeVar("T")

TASKS: Final = 40  # of a worker
FRAMES: Final = 8  # of a task
COLLECTIVES: Final = 20  # that a worker tells of
SPANS: Final = 32  # of a stage
RING: Final = 8  # workers that wait for each other


def name_of(number: int) -> str:
    return f"w{number:04}"


def summary(_: TellSummary, number: int, count: int) -> WorkerSummary:
    rates = CallRates(101.5, 0.25, 0.00125, 0.01375, 1234567.5)
    links = [
        LinkSummary(name_of(peer % count), False, 3, 12.25, 54321.125, 0.001375)  # noqa: FBT003
        for peer in range(LINKS_MAX)
    ]
    return WorkerSummary(
        pid=1000 + number,
        host=f"host-{number // 8}",
        running_s=1234.5625,
        is_draining=False,
        rates=WorkerRates(rates, rates, 1.5, 1.5, 3.0),
        backward_p50_s=0.0125,
        step_p50_s=0.0025,
        lag_s=0.000125,
        memory_bytes=1 << 30,
        slab_bytes=1 << 26,
        references=20,
        tasks=TASKS,
        calls_made=10,
        calls_served=10,
        links=links,
        links_left_out=max(0, count - LINKS_MAX),
    )


def calls(asked: ListCalls, number: int, count: int) -> CallsSeen:
    """Half of the calls are made here, the others served for the worker before."""
    half = asked.oldest_max // 2
    after, before = (number + 1) % count, (number - 1) % count

    def call_seen(caller: int, place: int, *, is_served: bool) -> CallSeen:
        callee = (caller + 1) % count
        other, state = (caller, RUNS) if is_served else (after, SENT)
        key = CallKey(caller + 1, callee + 1, place)
        name = f"module:function_{place}"
        return CallSeen(key, is_served, name_of(other), name, 1.25, state, False)  # noqa: FBT003

    outgoing = [call_seen(number, place, is_served=False) for place in range(half)]
    served = [call_seen(before, place, is_served=True) for place in range(half)]
    return CallsSeen([*outgoing, *served], 3)


def references(asked: ListReferences, number: int, count: int) -> ReferencesSeen:
    """All are owned here, and held by eight others."""
    holders = [name_of((number + more) % count) for more in range(8)]
    seen = [
        ReferenceSeen(
            RRefId(Incarnation(number + 1), serial),
            name_of(number),
            name_of(number),
            is_owner=True,
            state="owned",
            type_name="torch.Tensor",
            holders=holders,
            handles=1,
            lent=0,
            age_s=1234.5 + serial,
        )
        for serial in range(asked.oldest_max)
    ]
    return ReferencesSeen(seen, 3)


def training(asked: TellTraining, number: int, count: int) -> TrainingSeen:
    context = ContextId(Incarnation(1), 7)
    passes = [
        BackwardPassEnded(100.0 + at, 99.5 + at, context, name_of(0), True, at, "")  # noqa: FBT003
        for at in range(asked.newest_max)
    ]
    steps = [
        OptimizerStepEnded(100.0 + at, 99.5 + at, "SGD", (name_of(0),), OK, "")
        for at in range(asked.newest_max)
    ]
    spans = [StageSpanSeen("forward", at, at * 0.5, at + 0.5) for at in range(SPANS)]
    stage = StageStepSeen(100.0, 60.0, "c", 1, "1f1b", number, count, spans)
    return TrainingSeen(
        now_s=200.0,
        passes_per_s=1.5,
        steps_per_s=1.5,
        collectives_per_s=3.0,
        backward_p50_s=0.0125,
        step_p50_s=0.0025,
        passes=passes,
        under_way=[PassUnderWay("c", name_of(0), 1.25)],
        steps=steps,
        buckets=[BucketRates(at, 1 << 24, 1.5, 0.0125) for at in range(8)],
        stages=[stage],
    )


def collectives(
    asked: TellLastCollectives, number: int, count: int
) -> CollectiveHistory:
    """Nearly all have ended; in the last one every fourth rank is missing."""
    names = tuple(map(name_of, range(count)))
    ended = min(asked.ended_max, COLLECTIVES)
    began_ns = 1_700_000_000_000_000_000
    frames = tuple(StackFrame("step", "/app/train.py", at) for at in range(FRAMES))
    noted = [
        NotedCollective(
            0, at, "all_reduce", "float32", (1024, 1024), began_ns, began_ns + 7, OK, ()
        )
        for at in range(ended)
    ]
    if number % 4:
        noted.append(
            NotedCollective(
                *(0, ended, "all_reduce", "float32", (1024,), began_ns, UNDER_WAY, ""),
                frames,
            )
        )
    group = KnownGroup(1, "group 'all'", names, ended + bool(number % 4))
    return CollectiveHistory(
        name_of(number), number, 1000 + number, (group,), tuple(noted), is_whole=False
    )


def snapshot(_: TakeSnapshot, number: int, count: int) -> WorkerSnapshot:
    """One task waits for a call of the next of eight workers, others for events."""
    frames = tuple(StackFrame("step", "/app/train.py", at) for at in range(FRAMES))
    ring = number // RING * RING
    size = min(RING, count - ring)
    after, before = ring + (number + 1) % size, ring + (number - 1) % size
    key = CallKey(number + 1, after + 1, 1)
    served = CallKey(before + 1, number + 1, 1)
    waits = [Wait(WaitKind.CALL, "`step`", 20.0, call=key)]
    waits += [Wait(WaitKind.EVENT, f"Event {at}", 20.0) for at in range(TASKS - 1)]
    return WorkerSnapshot(
        name_of(number),
        rank=number,
        incarnation=number + 1,
        pid=1000 + number,
        host_id="host",
        blocked_for_s=0.0,
        loop_actor=NO_ACTOR,
        actors=tuple(
            ObservedActor(
                ActorKind.TASK, f"task {at}", "step", frames, wait, is_internal=False
            )
            for at, wait in enumerate(waits)
        ),
        made=(OutgoingCall(key, name_of(after), "step", 20.0),),
        served=(ServedCall(served, name_of(before), "step", 20.0, 0, is_stream=False),),
    )


# By the request; each is of one worker, by its number, of so many.
ANSWERS: Final[dict[type[Any], Callable[[Any, int, int], Any]]] = {
    TellSummary: summary,
    ListCalls: calls,
    ListReferences: references,
    TellTraining: training,
    TellLastCollectives: collectives,
    TakeSnapshot: snapshot,
}
