"""What a report says of spans that are known: sums, parts, and an aligned drawing."""

from __future__ import annotations

import pytest

from asyncrpc.nn import ActionKind, ActionSpan, PipelineReport, StageAction, StageReport
from asyncrpc.parallel.pipeline.schedules import TRAINING, simulate


def report(schedule: str, stages: int, chunks: int) -> PipelineReport:
    """Return that of stages whose forward passes take 1 s, backward passes 2 s."""
    spans = simulate(
        schedule,
        stages,
        chunks,
        lambda _, action: 2.0 - (action.kind is ActionKind.FORWARD),
    )
    return PipelineReport(
        schedule,
        chunks,
        tuple(
            StageReport(f"s{9 + index}", tuple(row), 0)
            for index, row in enumerate(spans)
        ),
    )


@pytest.mark.parametrize("schedule", TRAINING)
def test_perfect_pipeline_has_the_bubble_of_the_formula(schedule: str) -> None:
    outcome = report(schedule, 3, 8)
    assert outcome.duration_s == pytest.approx(3.0 * 10)
    assert [stage.busy_s for stage in outcome.stages] == pytest.approx([24.0] * 3)
    assert outcome.idle == pytest.approx([0.2] * 3)
    assert outcome.bubble == pytest.approx(0.2)
    assert outcome.balance == pytest.approx(0.2)
    assert outcome.formula == pytest.approx(0.2)


def test_message_delay_counts_in_the_bubble_but_not_in_the_balance() -> None:
    """Gradients of the last stage come 3 s late to the first."""
    prompt = report("gpipe", 2, 2)
    spans = tuple(
        span
        if span.action.kind is ActionKind.FORWARD
        else ActionSpan(span.action, span.start_s + 3.0, span.end_s + 3.0)
        for span in prompt.stages[0].spans
    )
    late = PipelineReport("gpipe", 2, (StageReport("s9", spans, 2), prompt.stages[1]))
    assert (prompt.duration_s, late.duration_s) == pytest.approx((9.0, 12.0))
    assert (prompt.bubble, late.bubble) == pytest.approx((1 / 3, 1 / 2))
    assert (prompt.balance, late.balance) == pytest.approx((1 / 3, 1 / 3))


def test_drawing_shows_the_actions_of_each_stage() -> None:
    assert report("gpipe", 2, 2).timeline(9).splitlines() == [
        "s9  ab...AABB",
        "s10 .abAABB..",
    ]
    assert report("1f1b", 2, 2).timeline(9).splitlines() == [
        "s9  ab..AA.BB",
        "s10 .aAAbBB..",
    ]


def test_drawing_starts_at_the_first_action_with_lines_of_one_length() -> None:
    stages = (
        StageReport(
            "front", (ActionSpan(StageAction(ActionKind.FORWARD, 0), 5.0, 6.0),), 1
        ),
        StageReport(
            "b", (ActionSpan(StageAction(ActionKind.BACKWARD, 27), 6.0, 6.1),), 1
        ),
    )
    lines = PipelineReport("gpipe", 1, stages).timeline(11).splitlines()
    assert lines == ["front aaaaaaaaaa.", "b     ..........B"]


def test_letters_repeat_after_26_micro_batches() -> None:
    assert set(report("gpipe", 1, 27).timeline(81).split(" ")[1]) >= {"a", "z", "A"}
