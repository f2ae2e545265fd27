"""What workers tell, for the tests of what is made of it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

from asyncrpc.core.ids import ContextId, Incarnation, RRefId
from asyncrpc.serving.dashboard.machine.answers import encoded
from asyncrpc.serving.dashboard.machine.training import TrainingAnswer
from asyncrpc.tools.inspection.collective_records import (
    UNDER_WAY,
    CollectiveHistory,
    KnownGroup,
    NotedCollective,
)
from asyncrpc.tools.inspection.details import (
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
from asyncrpc.tools.inspection.machine.slices import Slices
from asyncrpc.tools.inspection.records import CallKey
from asyncrpc.tools.inspection.reference_records import ReferenceSeen, ReferencesSeen
from asyncrpc.tools.inspection.summaries import LinkSummary, WorkerSummary
from asyncrpc.trace import OK, BackwardPassEnded, OptimizerStepEnded

T = TypeVar("T")

# Names that would be something else, if a page or a terminal took them for it.
ODD_NAMES: Final = (
    "<img src=x onerror=alert(1)>",
    "</script><script>alert(1)</script>",
    "\x00\x1b[31m\x7f\r\n",
    "x" * 10_000,
    "\u202egnirts",
    '"quoted" and \\',
    "\ud800",
    "\N{FAMILY}",
    " ",
    "",
)
# Numbers that JSON does not have.
NO_NUMBERS: Final = (math.nan, math.inf, -math.inf)
HUGE: Final = (1 << 63) - 1  # the most that travels
NO_RATES: Final = CallRates(0.0, 0.0, math.nan, math.nan, 0.0)


def done(work: Slices[T]) -> tuple[T, list[int]]:
    """Do work to its end; return what came of it, and how much each slice was."""
    steps = []
    while True:
        try:
            steps.append(next(work))
        except StopIteration as end:
            return end.value, steps


def as_sent(answer: Any) -> Any:
    """Return an answer as a browser reads it; it must be JSON."""
    text, _ = done(encoded(answer))

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def rows_of(rows: Iterable[Mapping[str, Any]], keys: str) -> list[tuple[Any, ...]]:
    """Return the fields of rows in the order of keys, which are all that they have."""
    listed = list(rows)
    assert all(set(row) == set(keys.split()) for row in listed)
    return [tuple(row[key] for key in keys.split()) for row in listed]


def column(rows: Iterable[Mapping[str, Any]], key: str) -> list[Any]:
    return [row[key] for row in rows]


def rates(
    calls_made: CallRates = NO_RATES, served: CallRates = NO_RATES
) -> WorkerRates:
    return WorkerRates(calls_made, served, 0.0, 0.0, 0.0)


def calls_a_second(
    per_s: float, *, failed: float = 0.0, p99_s: float = math.nan, nbytes: float = 0.0
) -> CallRates:
    return CallRates(per_s, failed, p99_s / 2, p99_s, nbytes)


def summary(**fields: Any) -> WorkerSummary:
    """Return a worker that does nothing, but for what is given."""
    plain = WorkerSummary(
        pid=7,
        host="host",
        running_s=1.0,
        is_draining=False,
        rates=rates(),
        backward_p50_s=math.nan,
        step_p50_s=math.nan,
        lag_s=0.0,
        memory_bytes=1000,
        slab_bytes=0,
        references=0,
        tasks=1,
        calls_made=0,
        calls_served=0,
        links=[],
        links_left_out=0,
    )
    return plain._replace(**fields)


def link(peer: str, **fields: Any) -> LinkSummary:
    plain = LinkSummary(
        peer, is_broken=False, in_flight=0, calls_per_s=1.0, bytes_per_s=2.0, p50_s=0.5
    )
    return plain._replace(**fields)


# --- calls and references ------------------------------------------------------------


def call(number: int, other: str, **fields: Any) -> CallSeen:
    """Return a call, as its caller sees it."""
    plain = CallSeen(
        CallKey(1, 2, number),
        is_served=False,
        other=other,
        function="f",
        for_s=1.0,
        state=SENT,
        is_stream=False,
    )
    return plain._replace(**fields)


def calls(*seen: CallSeen, left_out: int = 0) -> CallsSeen:
    return CallsSeen(list(seen), left_out)


def reference(serial: int, owner: str, **fields: Any) -> ReferenceSeen:
    """Return a reference, as its owner sees it."""
    plain = ReferenceSeen(
        RRefId(Incarnation(0xAB), serial),
        owner,
        creator="maker",
        is_owner=True,
        state="owned",
        type_name="Table",
        holders=["holder"],
        handles=1,
        lent=2,
        age_s=3.0,
    )
    return plain._replace(**fields)


def references(*seen: ReferenceSeen, left_out: int = 0) -> ReferencesSeen:
    return ReferencesSeen(list(seen), left_out)


# --- collectives ---------------------------------------------------------------------


def group(members: Sequence[str], *, begun: int = 0, group_id: int = 1) -> KnownGroup:
    return KnownGroup(group_id, "group 'all'", tuple(members), begun)


def noted(number: int, **fields: Any) -> NotedCollective:
    """Return a collective of the first group, which has ended well."""
    plain = NotedCollective(
        group=0,
        number=number,
        operation="all_reduce",
        dtype="float32",
        shape=(2, 3),
        began_ns=1_000_000_000,
        ended_ns=3_000_000_000,
        outcome=OK,
        frames=(),
    )
    return plain._replace(**fields)


def under_way(number: int, **fields: Any) -> NotedCollective:
    return noted(number, ended_ns=UNDER_WAY, outcome="", **fields)


def history(
    name: str, groups: Iterable[KnownGroup], collectives: Iterable[NotedCollective] = ()
) -> CollectiveHistory:
    return CollectiveHistory(
        name, 0, 7, tuple(groups), tuple(collectives), is_whole=True
    )


# --- training ------------------------------------------------------------------------


def training(
    *, host_id: str = "host", came_s: float = 0.0, **fields: Any
) -> TrainingAnswer:
    plain = TrainingSeen(
        now_s=100.0,
        passes_per_s=0.0,
        steps_per_s=0.0,
        collectives_per_s=0.0,
        backward_p50_s=math.nan,
        step_p50_s=math.nan,
        passes=[],
        under_way=[],
        steps=[],
        buckets=[],
        stages=[],
    )
    return TrainingAnswer(plain._replace(**fields), came_s, host_id)


def backward_pass(at_s: float, **fields: Any) -> BackwardPassEnded:
    plain = BackwardPassEnded(
        at_s,
        at_s - 0.5,
        ContextId(Incarnation(0xAB), 3),
        root="a",
        is_committed=True,
        pass_number=1,
        task="",
    )
    return plain._replace(**fields)


def pass_under_way(for_s: float) -> PassUnderWay:
    return PassUnderWay("context", "a", for_s)


def optimizer_step(at_s: float, **fields: Any) -> OptimizerStepEnded:
    plain = OptimizerStepEnded(at_s, at_s - 0.25, "SGD", ("a", "b"), OK, "")
    return plain._replace(**fields)


def bucket(place: int, **fields: Any) -> BucketRates:
    return BucketRates(place, 1 << 20, 2.0, 0.1)._replace(**fields)


def stage(place: int, stages: int = 2, **fields: Any) -> StageStepSeen:
    """Return a step of a stage: half a second forward, half a second backward."""
    plain = StageStepSeen(
        at_s=11.0,
        began_s=10.0,
        context="c",
        number=1,
        schedule="1f1b",
        stage=place,
        stages=stages,
        spans=[span("forward", 0.0, 0.5), span("backward", 0.5, 1.0)],
    )
    return plain._replace(**fields)


def span(kind: str, start_s: float, end_s: float, chunk: int = 0) -> StageSpanSeen:
    return StageSpanSeen(kind, chunk, start_s, end_s)
