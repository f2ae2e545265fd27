"""The training of a group: rates, buckets, passes, and the stages of a pipeline."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from asyncrpc.serving.dashboard.machine.answers import known, known_age
from asyncrpc.serving.dashboard.machine.paging import Row
from asyncrpc.tools.inspection.details import StageStepSeen, TrainingSeen, context_name
from asyncrpc.tools.inspection.machine.slices import SLICE_MAX, Slices, weighed_parts

KEYS: Final = (
    *("worker", "passes_per_s", "steps_per_s", "collectives_per_s"),
    *("backward_p50_s", "step_p50_s", "buckets"),
)
PASSES_MAX: Final = 100  # are listed
STEPS_MAX: Final = 50
STAGES_MAX: Final = 64
SPANS_MAX: Final = 4000  # of all stages together
TIME_MAX_S: Final = 1e12  # more is an error of the reporting worker


class TrainingAnswer(NamedTuple):
    """The training of a worker, and how its clock relates to those of the others.

    Attributes:
        came_s: when the answer came, by the clock of this process.
    """

    seen: TrainingSeen
    came_s: float
    host_id: str


def rows_of(answers: Mapping[str, TrainingAnswer]) -> Slices[list[Row]]:
    """Return a row for each worker, in slices."""
    rows: list[Row] = []

    def weight_of(item: tuple[str, TrainingAnswer]) -> int:
        return 1 + len(item[1].seen.buckets)

    for part, weight in weighed_parts(answers.items(), weight_of):
        rows += [_row(name, answer.seen) for name, answer in part]
        yield weight
    return rows


def _row(name: str, seen: TrainingSeen) -> Row:
    return {
        "worker": name,
        "passes_per_s": known(seen.passes_per_s),
        "steps_per_s": known(seen.steps_per_s),
        "collectives_per_s": known(seen.collectives_per_s),
        "backward_p50_s": known(seen.backward_p50_s),
        "step_p50_s": known(seen.step_p50_s),
        "buckets": [
            {
                "bucket": it.bucket,
                "bytes": it.nbytes,
                "per_s": known(it.per_s),
                "p50_s": known(it.p50_s),
            }
            for it in seen.buckets
        ],
    }


class _First:
    """The first rows by some order, of many that are added in parts."""

    def __init__(self, rows_max: int, rank: Callable[[Row], float]) -> None:
        self.count = 0
        self._rows_max = rows_max
        self._rank = rank
        self._rows: list[Row] = []

    def add(self, rows: Iterable[Row]) -> None:
        before = len(self._rows)
        self._rows += rows
        self.count += len(self._rows) - before
        if len(self._rows) >= self._rows_max + SLICE_MAX:
            self._rows = self.rows

    @property
    def rows(self) -> list[Row]:
        """Return the rows in order; equal rows stay in the order of their addition."""
        return heapq.nsmallest(self._rows_max, self._rows, key=self._rank)


def _oldest_first(row: Row) -> float:
    return -_age_of(row, 0.0)


def _newest_first(row: Row) -> float:
    return _age_of(row, math.inf)


def _age_of(row: Row, unknown: float) -> float:
    age_s: float | None = row["age_s"]
    return unknown if age_s is None else age_s


def passes_of(answers: Mapping[str, TrainingAnswer]) -> Slices[dict[str, Any]]:
    """Return backward passes, under way and ended, in slices.

    Passes under way come first, the oldest at the top, as it may hang; then the newest
    of the passes that have ended.
    """
    under_way = _First(PASSES_MAX, _oldest_first)
    ended = _First(PASSES_MAX, _newest_first)
    for name, answer in answers.items():
        seen = answer.seen
        under_way.add(
            {
                "worker": name,
                "root": it.root,
                "context": it.context,
                "age_s": known_age(it.for_s),
                "state": "under way",
                "took_s": None,
            }
            for it in seen.under_way
        )
        ended.add(
            {
                "worker": name,
                "root": it.root,
                "context": context_name(it.context_id),
                "age_s": _age_s(seen.now_s, it.at_s),
                "state": "committed" if it.is_committed else "dropped",
                "took_s": known(it.at_s - it.began_s),
            }
            for it in seen.passes
        )
        yield len(seen.under_way) + len(seen.passes)
    passes = [*under_way.rows, *ended.rows][:PASSES_MAX]
    left_out = under_way.count + ended.count - len(passes)
    return {"passes": passes, "passes_left_out": left_out}


def steps_of(answers: Mapping[str, TrainingAnswer]) -> Slices[dict[str, Any]]:
    """Return optimizer steps, the newest first, in slices."""
    steps = _First(STEPS_MAX, _newest_first)
    for name, answer in answers.items():
        steps.add(
            {
                "worker": name,
                "optimizer": it.optimizer,
                "owners": list(it.owners[:STAGES_MAX]),
                "owners_left_out": max(0, len(it.owners) - STAGES_MAX),
                "state": it.outcome,
                "age_s": _age_s(answer.seen.now_s, it.at_s),
                "took_s": known(it.at_s - it.began_s),
            }
            for it in answer.seen.steps
        )
        yield len(answer.seen.steps)
    rows = steps.rows
    return {"steps": rows, "steps_left_out": steps.count - len(rows)}


def _age_s(now_s: float, at_s: float) -> float | None:
    """Return the age of an event of a given time; at least 0."""
    age_s = known(now_s - at_s)
    return None if age_s is None else max(0.0, age_s)


# --- pipelines -----------------------------------------------------------------------


class _StageSeen(NamedTuple):
    """A step of a stage, with times by one clock for all stages."""

    worker: str
    step: StageStepSeen
    began_s: float
    starts_s: float  # its first computation
    ends_s: float
    busy_s: float
    is_of_one_clock: bool


def pipeline_of(answers: Mapping[str, TrainingAnswer]) -> Slices[dict[str, Any]]:
    """Return the last pipeline step that most of its stages report, in slices.

    Stages of one host have one clock.  Stages of other hosts are aligned by when their
    answers came, which is wrong by the time that the answer took.  A stage with invalid
    times is left out.
    """
    steps: dict[tuple[str, int, int], list[_StageSeen]] = {}
    is_one_host = len({answer.host_id for answer in answers.values()}) <= 1
    for some, weight in weighed_parts(answers.items(), _count_of):
        for name, answer in some:
            shift_s = 0.0 if is_one_host else answer.came_s - answer.seen.now_s
            for step in answer.seen.stages:
                began_s = step.began_s + shift_s
                if _has_times(step, began_s):
                    key = step.context, step.number, step.stages
                    seen = _seen(name, step, began_s, is_of_one_clock=is_one_host)
                    steps.setdefault(key, []).append(seen)
        yield weight
    if not steps:
        return {"pipeline": [], "pipeline_step": None}
    stages = max(steps.values(), key=lambda stages: (len(stages), _end_s(stages)))
    stages.sort(key=lambda stage: stage.step.stage)
    left_out = max(0, len(stages) - STAGES_MAX)
    return (yield from _drawn(stages[:STAGES_MAX], left_out=left_out))


def _count_of(item: tuple[str, TrainingAnswer]) -> int:
    return 1 + sum(len(step.spans) for step in item[1].seen.stages)


def _has_times(step: StageStepSeen, began_s: float) -> bool:
    """Return whether the times of a step are valid."""
    return abs(began_s) < TIME_MAX_S and all(
        abs(span.start_s) < TIME_MAX_S and abs(span.end_s) < TIME_MAX_S
        for span in step.spans
    )


def _seen(
    worker: str, step: StageStepSeen, began_s: float, *, is_of_one_clock: bool
) -> _StageSeen:
    return _StageSeen(
        worker,
        step,
        began_s,
        began_s + min((span.start_s for span in step.spans), default=0.0),
        began_s + max((span.end_s for span in step.spans), default=0.0),
        sum(span.end_s - span.start_s for span in step.spans),
        is_of_one_clock,
    )


def _end_s(stages: Sequence[_StageSeen]) -> float:
    return max(stage.ends_s for stage in stages)


def _drawn(stages: Sequence[_StageSeen], *, left_out: int) -> Slices[dict[str, Any]]:
    zero_s = min(stage.starts_s for stage in stages)
    whole_s = max(0.0, _end_s(stages) - zero_s)
    spans_max = SPANS_MAX // len(stages)
    drawn: list[dict[str, Any]] = []
    shares: list[float] = []

    def weight_of(stage: _StageSeen) -> int:
        return min(spans_max, len(stage.step.spans))

    for some, weight in weighed_parts(stages, weight_of):
        for stage in some:
            share = min(1.0, max(0.0, stage.busy_s / whole_s)) if whole_s else None
            shares += [] if share is None else [share]
            drawn.append(_stage(stage, zero_s, share, spans_max))
        yield weight
    first = stages[0]
    return {
        "pipeline": drawn,
        "pipeline_step": {
            "number": first.step.number,
            "schedule": first.step.schedule,
            "stages": first.step.stages,
            "told": len(stages),
            "left_out": left_out,
            "took_s": whole_s,
            "bubble": 1 - sum(shares) / len(shares) if shares else None,
            "is_of_one_clock": first.is_of_one_clock,
        },
    }


def _stage(
    stage: _StageSeen, zero_s: float, share: float | None, spans_max: int
) -> dict[str, Any]:
    shift_s = stage.began_s - zero_s
    return {
        "stage": stage.step.stage,
        "worker": stage.worker,
        "busy_share": share,
        "spans": [
            {
                "start_s": span.start_s + shift_s,
                "end_s": span.end_s + shift_s,
                "kind": span.kind,
                "chunk": span.chunk,
            }
            for span in stage.step.spans[:spans_max]
        ],
        "spans_left_out": max(0, len(stage.step.spans) - spans_max),
    }
