"""The training of a group: rates, buckets, passes, and the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from asyncrpc.inspection.details import StageStepSeen, TrainingSeen, context_name
from asyncrpc.inspection.machine.slices import Slices, parts_of
from asyncrpc.serving.dashboard.machine.numbers import known
from asyncrpc.serving.dashboard.machine.paging import Row

KEYS: Final = (
    *("worker", "passes_per_s", "steps_per_s", "collectives_per_s"),
    *("backward_p50_s", "step_p50_s", "buckets"),
)
PASSES_MAX: Final = 100  # that are listed
STEPS_MAX: Final = 50
STAGES_MAX: Final = 64
SPANS_MAX: Final = 4000  # of all stages together


class TrainingTold(NamedTuple):
    """What a worker has told, and how its clock relates to that of the others.

    Attributes:
        told: by the worker.
        came_s: when it was told, by the clock of this process.
        host_id: of its host: workers of one host have one clock.
    """

    told: TrainingSeen
    came_s: float
    host_id: str


def rows_of(told: Mapping[str, TrainingTold]) -> Slices[list[Row]]:
    """Return a row for each worker, in slices."""
    rows: list[Row] = []
    for part in parts_of(told.items()):
        rows += [_row(name, one.told) for name, one in part]
        yield len(part)
    return rows


def _row(name: str, one: TrainingSeen) -> Row:
    return {
        "worker": name,
        "passes_per_s": one.passes_per_s,
        "steps_per_s": one.steps_per_s,
        "collectives_per_s": one.collectives_per_s,
        "backward_p50_s": known(one.backward_p50_s),
        "step_p50_s": known(one.step_p50_s),
        "buckets": [
            {
                "bucket": it.bucket,
                "bytes": it.nbytes,
                "per_s": it.per_s,
                "p50_s": known(it.p50_s),
            }
            for it in one.buckets
        ],
    }


def passes_of(told: Mapping[str, TrainingTold]) -> Slices[dict[str, Any]]:
    """Return backward passes, under way and ended: the newest first, in slices."""
    under_way: list[dict[str, Any]] = []
    ended: list[dict[str, Any]] = []
    for name, one in told.items():
        seen = one.told
        under_way += [
            {
                "worker": name,
                "root": it.root,
                "context": it.context,
                "age_s": it.for_s if it.for_s >= 0 else None,
                "state": "under way",
                "took_s": None,
            }
            for it in seen.under_way
        ]
        ended += [
            {
                "worker": name,
                "root": it.root,
                "context": context_name(it.context_id),
                "age_s": max(0.0, seen.now_s - it.at_s),
                "state": "committed" if it.is_committed else "dropped",
                "took_s": it.at_s - it.began_s,
            }
            for it in seen.passes
        ]
        yield len(seen.under_way) + len(seen.passes)
    under_way.sort(key=lambda it: -(it["age_s"] or 0.0))
    ended.sort(key=lambda it: float(it["age_s"]))
    found = [*under_way, *ended]
    return {
        "passes": found[:PASSES_MAX],
        "passes_left_out": max(0, len(found) - PASSES_MAX),
    }


def steps_of(told: Mapping[str, TrainingTold]) -> Slices[dict[str, Any]]:
    """Return optimizer steps, the newest first, in slices."""
    found: list[dict[str, Any]] = []
    for name, one in told.items():
        found += [
            {
                "worker": name,
                "optimizer": it.optimizer,
                "owners": list(it.owners[:STAGES_MAX]),
                "state": it.outcome,
                "age_s": max(0.0, one.told.now_s - it.at_s),
                "took_s": it.at_s - it.began_s,
            }
            for it in one.told.steps
        ]
        yield len(one.told.steps)
    found.sort(key=lambda it: float(it["age_s"]))
    left_out = max(0, len(found) - STEPS_MAX)
    return {"steps": found[:STEPS_MAX], "steps_left_out": left_out}


# --- pipelines -----------------------------------------------------------------------


class _StageSeen(NamedTuple):
    worker: str
    step: StageStepSeen
    began_s: float  # by one clock for all stages
    is_of_one_clock: bool


def pipeline_of(told: Mapping[str, TrainingTold]) -> dict[str, Any]:
    """Return the last step of a pipeline that is known of most of its stages.

    Stages of one host have one clock.  Those of others are put in line by when they
    told of it, which is wrong by the time that the answer took.
    """
    steps: dict[tuple[str, int, int], list[_StageSeen]] = {}
    is_one_host = len({one.host_id for one in told.values()}) <= 1
    for name, one in told.items():
        shift_s = 0.0 if is_one_host else one.came_s - one.told.now_s
        for step in one.told.stages:
            key = step.context, step.number, step.stages
            began_s = step.began_s + shift_s
            seen = _StageSeen(name, step, began_s, is_one_host)
            steps.setdefault(key, []).append(seen)
    if not steps:
        return {"pipeline": [], "pipeline_step": None}
    found = max(steps.values(), key=lambda stages: (len(stages), _end_s(stages)))
    found.sort(key=lambda one: one.step.stage)
    return _drawn(found[:STAGES_MAX], left_out=max(0, len(found) - STAGES_MAX))


def _end_s(stages: Sequence[_StageSeen]) -> float:
    return max(one.began_s + _last_s(one.step) for one in stages)


def _last_s(step: StageStepSeen) -> float:
    return max((span.end_s for span in step.spans), default=0.0)


def _drawn(stages: Sequence[_StageSeen], *, left_out: int) -> dict[str, Any]:
    starts = [one.began_s + span.start_s for one in stages for span in one.step.spans]
    zero_s = min(starts, default=0.0)
    whole_s = max(0.0, _end_s(stages) - zero_s)
    spans_max = SPANS_MAX // len(stages)
    drawn: list[dict[str, Any]] = []
    for one in stages:
        shift_s = one.began_s - zero_s
        busy_s = sum(span.end_s - span.start_s for span in one.step.spans)
        drawn.append(
            {
                "stage": one.step.stage,
                "worker": one.worker,
                "busy_share": min(1.0, busy_s / whole_s) if whole_s else None,
                "spans": [
                    {
                        "start_s": span.start_s + shift_s,
                        "end_s": span.end_s + shift_s,
                        "kind": span.kind,
                        "chunk": span.chunk,
                    }
                    for span in one.step.spans[:spans_max]
                ],
                "spans_left_out": max(0, len(one.step.spans) - spans_max),
            }
        )
    shares: list[float] = [
        it["busy_share"] for it in drawn if it["busy_share"] is not None
    ]
    first = stages[0].step
    return {
        "pipeline": drawn,
        "pipeline_step": {
            "number": first.number,
            "schedule": first.schedule,
            "stages": first.stages,
            "told": len(stages),
            "left_out": left_out,
            "took_s": whole_s,
            "bubble": 1 - sum(shares) / len(shares) if shares else None,
            "is_of_one_clock": stages[0].is_of_one_clock,
        },
    }
