"""Snapshots of workers, for the tests of hangs and of one worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncrpc.core.loop.waits import WaitKind
from asyncrpc.tools.inspection.records import (
    NO_ACTOR,
    ActorKind,
    CallKey,
    ObservedActor,
    ServedCall,
    StackFrame,
    Wait,
    WorkerSnapshot,
)

RUNS = Wait(WaitKind.RUNS, "step()")
EVENT = Wait(WaitKind.EVENT, "Event `go`", 4.0)


def frames(count: int) -> tuple[StackFrame, ...]:
    """Return a stack, the outermost frame first."""
    return tuple(
        StackFrame(f"f{line}", "/app/train.py", line) for line in range(1, count + 1)
    )


def actor(name: str, wait: Wait = RUNS, **fields: Any) -> ObservedActor:
    """Return a task."""
    plain = ObservedActor(
        ActorKind.TASK, name, name, frames(2), wait, is_internal=False
    )
    return plain._replace(**fields)


def thread(name: str, wait: Wait = RUNS, **fields: Any) -> ObservedActor:
    return actor(name, wait, kind=ActorKind.THREAD, **fields)


def snapshot(
    name: str, actors: Sequence[ObservedActor] = (), **fields: Any
) -> WorkerSnapshot:
    plain = WorkerSnapshot(
        name,
        rank=0,
        incarnation=sum(name.encode(errors="surrogatepass")),
        pid=7,
        host_id="host",
        blocked_for_s=0.0,
        loop_actor=NO_ACTOR,
        actors=tuple(actors),
        made=(),
        served=(),
    )
    return plain._replace(**fields)


def lock(*holders: int, for_s: float = 20.0) -> Wait:
    """Return a wait for a lock that tasks of the worker hold."""
    return Wait(WaitKind.LOCK, "Lock `table`", for_s, holders, is_closed=True)


def call_to(number: int, *, for_s: float = 20.0) -> Wait:
    """Return a wait for the answer of a call."""
    return Wait(WaitKind.CALL, "`f`", for_s, call=CallKey(1, 2, number))


def served_by(place: int, number: int, caller: str = "a") -> ServedCall:
    return ServedCall(CallKey(1, 2, number), caller, "f", 5.0, place, is_stream=False)
