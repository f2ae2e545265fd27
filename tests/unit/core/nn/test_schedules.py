"""Pipelines: schedules keep their bounds, batches are cut and joined, spans add up."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrpc.errors import LocalProtocolError, UsageError
from asyncrpc.nn import ActionKind, ActionSpan, PipelineReport, StageAction, StageReport
from asyncrpc.parallel.pipeline.pipeline import join, rows_of, sizes, split
from asyncrpc.parallel.pipeline.schedules import (
    INFERENCE,
    TRAINING,
    ChunkState,
    StageMachine,
    StagePosition,
    actions,
    bubble,
    check_schedule,
    held_max,
    idle_part,
    simulate,
    step_s,
)

F, B, R = ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.RELEASE
SIZES = [(1, 1), (1, 4), (2, 1), (2, 4), (3, 2), (3, 8), (4, 16), (5, 3)]

stages_and_chunks = st.tuples(st.integers(1, 6), st.integers(1, 12))


def text(order: tuple[StageAction, ...]) -> str:
    return " ".join(f"{action.kind.name[0]}{action.chunk}" for action in order)


def test_schedules_have_the_orders_of_the_papers() -> None:
    assert text(actions("gpipe", StagePosition(0, 2), 3)) == "F0 F1 F2 B0 B1 B2"
    assert text(actions("1f1b", StagePosition(0, 3), 4)) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert text(actions("1f1b", StagePosition(1, 3), 4)) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert text(actions("1f1b", StagePosition(2, 3), 4)) == "F0 B0 F1 B1 F2 B2 F3 B3"
    assert text(actions(INFERENCE, StagePosition(0, 3), 3)) == "F0 F1 R0 F2 R1 R2"


@given(st.sampled_from([*TRAINING, INFERENCE]), stages_and_chunks, st.data())
def test_each_micro_batch_goes_forward_once_and_ends_once(
    schedule: str, sizes: tuple[int, int], data: st.DataObject
) -> None:
    stages, chunks = sizes
    place = StagePosition(data.draw(st.integers(0, stages - 1)), stages)
    order = actions(schedule, place, chunks)
    end = R if schedule == INFERENCE else B
    for kind in (F, end):
        assert [action.chunk for action in order if action.kind is kind] == [
            *range(chunks)
        ]
    assert len(order) == 2 * chunks
    for chunk in range(chunks):
        assert order.index(StageAction(F, chunk)) < order.index(StageAction(end, chunk))


def test_stage_holds_as_many_micro_batches_as_its_schedule_allows() -> None:
    assert [held_max("1f1b", StagePosition(k, 4), 16) for k in range(4)] == [4, 3, 2, 1]
    assert [held_max("1f1b", StagePosition(k, 4), 2) for k in range(4)] == [2, 2, 2, 1]
    assert [held_max("gpipe", StagePosition(k, 4), 16) for k in range(4)] == [16] * 4
    assert [held_max(INFERENCE, StagePosition(k, 4), 16) for k in range(4)] == [2] * 4


@pytest.mark.parametrize("schedule", TRAINING)
@pytest.mark.parametrize(("stages", "chunks"), SIZES)
def test_idle_share_of_equal_stages_follows_the_formula(
    schedule: str, stages: int, chunks: int
) -> None:
    """Whatever a backward pass takes, here twice as long as a forward pass."""
    spans = simulate(
        schedule, stages, chunks, lambda _, action: 1.0 if action.kind is F else 2.0
    )
    whole_s = step_s(spans)
    assert whole_s == pytest.approx(3.0 * (chunks + stages - 1))
    for stage in spans:
        assert idle_part(stage, whole_s) == pytest.approx(bubble(stages, chunks))


@given(st.sampled_from(TRAINING), stages_and_chunks, st.data())
def test_schedules_neither_deadlock_nor_overlap_on_a_stage(
    schedule: str, sizes: tuple[int, int], data: st.DataObject
) -> None:
    stages, chunks = sizes
    seconds = st.floats(0.01, 10.0)
    spans = simulate(schedule, stages, chunks, lambda *_: data.draw(seconds))
    ends = {
        (stage, span.action): span for stage, row in enumerate(spans) for span in row
    }
    for stage, row in enumerate(spans):
        for span, following in itertools.pairwise(row):
            assert span.end_s <= following.start_s
        for span in row:
            before = (stage - 1 if span.action.kind is F else stage + 1, span.action)
            if before in ends:
                assert ends[before].end_s <= span.start_s


@pytest.mark.parametrize("name", ["1F1B", "interleaved", INFERENCE])
def test_unknown_schedule_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="'gpipe' or '1f1b'"):
        check_schedule(name, 4)


@pytest.mark.parametrize("chunks", [0, -1, True, 2.0])
def test_micro_batches_are_counted(chunks: int) -> None:
    with pytest.raises(UsageError, match="at least 1"):
        check_schedule("gpipe", chunks)


# --- one stage -----------------------------------------------------------------------


def step(machine: StageMachine, kind: ActionKind, chunk: int) -> None:
    action = StageAction(kind, chunk)
    assert machine.due == action
    machine.begin(action)
    machine.end(action)


def test_due_action_waits_for_its_inputs() -> None:
    machine = StageMachine("1f1b", StagePosition(1, 3), 3)
    assert machine.due is None
    machine.arrive(1)
    assert machine.due is None  # the first comes first
    machine.arrive(0)
    step(machine, F, 0)
    step(machine, F, 1)
    machine.arrive(2)
    assert machine.due is None  # no third one is held
    machine.answer(1)
    assert machine.due is None
    machine.answer(0)
    step(machine, B, 0)
    step(machine, F, 2)
    step(machine, B, 1)
    assert machine.due is None
    machine.answer(2)
    step(machine, B, 2)
    assert (machine.is_done, machine.due) == (True, None)
    assert (machine.held, machine.held_most) == (0, 2)
    assert machine.state(2) is ChunkState.DONE


@given(st.sampled_from(TRAINING), stages_and_chunks, st.data())
def test_stage_finishes_for_every_order_of_arrivals(
    schedule: str, sizes: tuple[int, int], data: st.DataObject
) -> None:
    stages, chunks = sizes
    place = StagePosition(data.draw(st.integers(0, stages - 1)), stages)
    machine = StageMachine(schedule, place, chunks)
    to_come, to_answer = set(range(chunks)), set[int]()
    while not machine.is_done:
        if machine.due is not None:
            action = machine.due
            machine.begin(action)
            machine.end(action)
            if action.kind is F:
                to_answer.add(action.chunk)
            assert machine.held <= held_max(schedule, place, chunks)
            continue
        events = [(True, chunk) for chunk in to_come] + [
            (False, chunk) for chunk in to_answer
        ]
        is_input, chunk = data.draw(st.sampled_from(events))
        if is_input:
            to_come.remove(chunk)
            machine.arrive(chunk)
        else:
            to_answer.remove(chunk)
            machine.answer(chunk)
    assert machine.held == 0
    assert machine.held_most == held_max(schedule, place, chunks)


def test_illegal_event_is_refused() -> None:
    machine = StageMachine("gpipe", StagePosition(0, 2), 2)
    machine.arrive(0)
    for again in (0, 2, -1):
        with pytest.raises(LocalProtocolError, match=f"micro-batch {again}"):
            machine.arrive(again)
    with pytest.raises(LocalProtocolError, match=r"answered.*its input is here"):
        machine.answer(0)
    for early in (StageAction(F, 1), StageAction(B, 0)):
        with pytest.raises(LocalProtocolError, match="not due"):
            machine.begin(early)
    assert machine.held == 0


def value(rows: int) -> Any:
    x = torch.arange(rows * 3).reshape(rows, 3)
    return x, {"half": [x[:, :1], 0.5], "name": None}


@given(st.integers(1, 40), st.data())
def test_parts_join_to_the_batch_and_differ_by_a_row_at_most(
    rows: int, data: st.DataObject
) -> None:
    parts = data.draw(st.integers(1, rows))
    pieces = split(value(rows), parts)
    each = [rows_of(piece, "part") for piece in pieces]
    assert each == sizes(rows, parts)
    assert max(each) - min(each) <= 1
    x, more = join(pieces)
    assert torch.equal(x, value(rows)[0])
    assert torch.equal(more["half"][0], x[:, :1])
    assert (more["half"][1], more["name"]) == (0.5, None)


def test_parts_are_views() -> None:
    x = torch.zeros(4, 2)
    split(x, 2)[1].fill_(1.0)
    assert x.sum() == 4.0


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ([1.0, "text"], "batch must have at least one tensor"),
        ((torch.ones(2), torch.ones(3)), "not 2 and 3"),
        ([torch.ones(2), torch.ones(())], "pass a number instead"),
    ],
)
def test_batch_that_cannot_be_split_is_refused(batch: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        rows_of(batch, "batch")


def test_parts_that_do_not_match_are_refused() -> None:
    with pytest.raises(UsageError, match="different forms"):
        join([torch.ones(2), [torch.ones(2)]])
    with pytest.raises(UsageError, match="at least one row each"):
        join([torch.ones(()), torch.ones(())])


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
