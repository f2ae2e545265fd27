"""The last steps of the pipeline stages of one worker.

A step has some dozens of spans, so far fewer steps are kept than of other events, and
they cannot be subscribed to: `PipelineResult.report` has them all.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from asyncrpc.core.ids import ContextId

STAGE_STEPS_MAX: Final = 32


class StageSpan(NamedTuple):
    """One computation of a stage.

    Attributes:
        kind: "forward" or "backward".
        chunk: number of the micro-batch.
        start_s: in seconds since the step reached the stage.
        end_s: in seconds since the step reached the stage.
    """

    kind: str
    chunk: int
    start_s: float
    end_s: float


class StageStep(NamedTuple):
    """One step of a pipeline, at one stage of it.

    Attributes:
        at_s: when it ended, by the clock of the worker's events.
        began_s: when it reached the stage.
        context_id: the same at all stages; None of a step without a context.
        number: of the step in its pipeline.
        schedule: name of the schedule.
        stage: index of the stage, from 0.
        stages: how many there are.
        spans: in order.
    """

    at_s: float
    began_s: float
    context_id: ContextId | None
    number: int
    schedule: str
    stage: int
    stages: int
    spans: tuple[StageSpan, ...]
