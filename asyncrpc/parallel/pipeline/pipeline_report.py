"""The report of a step of a pipeline: busy and idle stages, and the bubble."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from asyncrpc.core.arguments import check_count, wrong
from asyncrpc.parallel.pipeline.schedules import (
    ActionKind,
    ActionSpan,
    StageAction,
    bubble,
    idle_part,
    simulate,
    step_s,
)

COLUMNS_MAX = 10_000  # more than a reader needs
IDLE = "."
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class StageReport:
    """The report of one stage about one step.

    Attributes:
        worker: name of its worker.
        spans: when each micro-batch went forward and backward here, in order; in
            seconds from when the step came to the stage.
        held_max: the largest number of micro-batches whose activations it held at once.
    """

    worker: str
    spans: Sequence[ActionSpan]
    held_max: int

    @property
    def busy_s(self) -> float:
        """Seconds for which it computed."""
        return sum(span.duration_s for span in self.spans)


@dataclass(frozen=True, slots=True)
class PipelineReport:
    """The report of one training step of a pipeline.

    Times are those of forward and backward passes, in seconds.  Each stage counts from
    the arrival of the step, so two stages are comparable if messages to them took the
    same time.

    Attributes:
        schedule: `"1f1b"` or `"gpipe"`.
        chunks: how many micro-batches there were.
        stages: in order.
    """

    schedule: str
    chunks: int
    stages: Sequence[StageReport]

    @property
    def duration_s(self) -> float:
        """Seconds from the first forward pass to the end of the last backward pass."""
        return step_s([stage.spans for stage in self.stages])

    @property
    def idle(self) -> list[float]:
        """The fraction of `duration_s` for which each stage was idle: from 0 to 1."""
        whole_s = self.duration_s
        return [idle_part(stage.spans, whole_s) for stage in self.stages]

    @property
    def bubble(self) -> float:
        """The average fraction for which the stages were idle: from 0 to 1."""
        return fmean(self.idle)

    @property
    def formula(self) -> float:
        """The value of `bubble` if stages take the same time and messages none.

        For p stages and m micro-batches (p - 1) / (m + p - 1), by either schedule.
        """
        return bubble(len(self.stages), self.chunks)

    @property
    def balance(self) -> float:
        """The value of `bubble` for the measured times if messages took no time.

        Its excess over `formula` is due to stages that are not equally fast; the excess
        of `bubble` over it, to messages and to processors that stages share.
        """
        seconds = {
            (index, span.action): span.duration_s
            for index, stage in enumerate(self.stages)
            for span in stage.spans
        }
        count = len(self.stages)
        spans = simulate(self.schedule, count, self.chunks, lambda *at: seconds[at])
        whole_s = step_s(spans)
        return fmean(idle_part(stage_spans, whole_s) for stage_spans in spans)

    def timeline(self, columns: int = 72) -> str:
        """Draw when each stage ran which micro-batch, one line a stage.

        Args:
            columns: characters for the whole step.

        Returns:
            Lines of equal length: `a` is the forward pass of the first micro-batch,
            `A` its backward pass; `.` is idle.  A character shows the pass that took
            most of its time.

        Raises:
            UsageError: `columns` is not a positive integer, or is above 10,000.
        """
        check_count("columns", columns, at_least=1)
        if columns > COLUMNS_MAX:
            raise wrong("columns", f"at most {COLUMNS_MAX}", columns)
        every = [span for stage in self.stages for span in stage.spans]
        start_s = min(span.start_s for span in every)
        width_s = self.duration_s / columns
        names = [stage.worker for stage in self.stages]
        longest = max(map(len, names))
        return "\n".join(
            f"{name:<{longest}} "
            + "".join(
                _letter(stage.spans, start_s + column * width_s, width_s)
                for column in range(columns)
            )
            for name, stage in zip(names, self.stages, strict=True)
        )


def _letter(spans: Sequence[ActionSpan], from_s: float, width_s: float) -> str:
    """Return the letter of the pass that took most of `width_s` from `from_s` on."""
    shared = {
        span.action: shared_s
        for span in spans
        if (shared_s := min(span.end_s, from_s + width_s) - max(span.start_s, from_s))
        > 0
    }
    idle_s = width_s - sum(shared.values())
    if not shared or idle_s > max(shared.values()):
        return IDLE
    action: StageAction = max(shared, key=lambda candidate: shared[candidate])
    letter = LETTERS[action.chunk % len(LETTERS)]
    return letter if action.kind is ActionKind.FORWARD else letter.upper()
