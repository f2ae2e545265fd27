"""Training: rates, passes, steps, and the stages of a pipeline."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrpc.serving.dashboard.machine.training import (
    KEYS,
    PASSES_MAX,
    SPANS_MAX,
    STAGES_MAX,
    STEPS_MAX,
    TIME_MAX_S,
    TrainingAnswer,
    passes_of,
    pipeline_of,
    rows_of,
    steps_of,
)
from asyncrpc.tools.inspection.machine.slices import SLICE_MAX
from tests.unit.serving.dashboard.machine import told
from tests.unit.serving.dashboard.machine.told import (
    HUGE,
    NO_NUMBERS,
    ODD_NAMES,
    as_sent,
    backward_pass,
    bucket,
    column,
    done,
    optimizer_step,
    pass_under_way,
    span,
    stage,
    training,
)

Told = dict[str, TrainingAnswer]


def passes(reports: Told) -> dict[str, Any]:
    return done(passes_of(reports))[0]


def steps(reports: Told) -> dict[str, Any]:
    return done(steps_of(reports))[0]


def pipeline(reports: Told) -> dict[str, Any]:
    return done(pipeline_of(reports))[0]


# --- rows ----------------------------------------------------------------------------


def test_empty_group_has_no_rows() -> None:
    assert done(rows_of({})) == ([], [])
    assert passes({}) == {"passes": [], "passes_left_out": 0}
    assert steps({}) == {"steps": [], "steps_left_out": 0}
    assert pipeline({}) == {"pipeline": [], "pipeline_step": None}
    nothing = {"a": training()}
    assert passes(nothing) == passes({})
    assert steps(nothing) == steps({})
    assert pipeline(nothing) == pipeline({})


def test_row_has_all_keys() -> None:
    reports = training(
        passes_per_s=1.0,
        steps_per_s=2.0,
        collectives_per_s=3.0,
        backward_p50_s=4.0,
        step_p50_s=5.0,
        buckets=[bucket(0, nbytes=HUGE), bucket(3, per_s=0.0)],
    )
    (row,), _ = done(rows_of({"a": reports}))
    assert set(row) == set(KEYS)
    assert row == {
        "worker": "a",
        "passes_per_s": 1.0,
        "steps_per_s": 2.0,
        "collectives_per_s": 3.0,
        "backward_p50_s": 4.0,
        "step_p50_s": 5.0,
        "buckets": [
            {"bucket": 0, "bytes": HUGE, "per_s": 2.0, "p50_s": 0.1},
            {"bucket": 3, "bytes": 1 << 20, "per_s": 0.0, "p50_s": 0.1},
        ],
    }


@pytest.mark.parametrize("value", NO_NUMBERS)
def test_nonfinite_numbers_are_null_everywhere(value: float) -> None:
    reports = {
        "a": training(
            passes_per_s=value,
            steps_per_s=value,
            collectives_per_s=value,
            backward_p50_s=value,
            step_p50_s=value,
            buckets=[bucket(0, per_s=value, p50_s=value)],
            passes=[backward_pass(value), backward_pass(1.0, began_s=value)],
            under_way=[pass_under_way(value), pass_under_way(2.0)],
            steps=[optimizer_step(value), optimizer_step(1.0, began_s=value)],
            stages=[stage(0, began_s=value)],
        )
    }
    (row,), _ = done(rows_of(reports))
    assert [row[key] for key in KEYS if key not in ("worker", "buckets")] == [None] * 5
    assert row["buckets"][0]["per_s"] is row["buckets"][0]["p50_s"] is None
    ages = [entry["age_s"] for entry in passes(reports)["passes"]]
    assert ages == [2.0, None, 99.0, None]  # what is not known is last of its kind
    assert [entry["age_s"] for entry in steps(reports)["steps"]] == [99.0, None]
    assert all(entry["took_s"] is None for entry in passes(reports)["passes"])
    assert pipeline(reports)["pipeline"] == []
    for answer in (row, passes(reports), steps(reports), pipeline(reports)):
        as_sent(answer)


def test_odd_names_stay_text() -> None:
    reports = {
        name: training(
            passes=[backward_pass(1.0, root=name)],
            under_way=[pass_under_way(1.0)._replace(root=name, context=name)],
            steps=[optimizer_step(1.0, optimizer=name, owners=ODD_NAMES, outcome=name)],
            stages=[stage(place, context="c", schedule=name)],
        )
        for place, name in enumerate(ODD_NAMES)
    }
    answer = {
        "rows": done(rows_of(reports))[0],
        **passes(reports),
        **steps(reports),
        **pipeline(reports),
    }
    assert as_sent(answer) == answer
    assert {lane["worker"] for lane in answer["pipeline"]} == set(ODD_NAMES)


@pytest.mark.parametrize("count", [1, SLICE_MAX - 1, SLICE_MAX, 2 * SLICE_MAX + 1])
def test_rows_are_made_a_slice_at_a_time(count: int) -> None:
    reports = {f"w{number}": training() for number in range(count)}
    made_rows, sizes = done(rows_of(reports))
    assert len(made_rows) == sum(sizes) == count
    assert max(sizes) <= SLICE_MAX
    reports = {f"w{number}": training(buckets=[bucket(0)] * 99) for number in range(50)}
    assert done(rows_of(reports))[1] == [500] * 10  # a worker and its buckets are 100


# --- passes and steps ----------------------------------------------------------------


def test_pass_shows_how_it_ended() -> None:
    reports = {
        "a": training(
            passes=[backward_pass(99.0), backward_pass(98.0, is_committed=False)],
            under_way=[pass_under_way(3.0)],
        )
    }
    context = "00000000000000ab-0000000000000003"
    listed = passes(reports)["passes"]
    assert told.rows_of(listed, "worker root context age_s state took_s") == [
        ("a", "a", "context", 3.0, "under way", None),
        ("a", "a", context, 1.0, "committed", 0.5),
        ("a", "a", context, 2.0, "dropped", 0.5),
    ]


def test_running_passes_precede_ended_ones_by_age() -> None:
    reports = {
        "a": training(
            passes=[backward_pass(at_s) for at_s in (90.0, 99.0)],
            under_way=[pass_under_way(1.0), pass_under_way(-1.0), pass_under_way(9.0)],
        ),
        "b": training(passes=[backward_pass(95.0)], under_way=[pass_under_way(5.0)]),
    }
    ages = column(passes(reports)["passes"], "age_s")
    assert ages == [9.0, 5.0, 1.0, None, 1.0, 5.0, 10.0]


def test_equal_entries_keep_the_order_of_their_workers() -> None:
    reports = {
        name: training(
            passes=[backward_pass(99.0)] * 2,
            under_way=[pass_under_way(1.0)] * 2,
            steps=[optimizer_step(99.0)] * 2,
        )
        for name in ("b", "a", "c")
    }
    assert column(passes(reports)["passes"], "worker") == [*"bbaacc", *"bbaacc"]
    assert [entry["worker"] for entry in steps(reports)["steps"]] == [*"bbaacc"]


def test_future_event_gives_no_negative_age() -> None:
    reports = {
        "a": training(passes=[backward_pass(101.0)], steps=[optimizer_step(200.0)])
    }
    assert passes(reports)["passes"][0]["age_s"] == 0.0
    assert steps(reports)["steps"][0]["age_s"] == 0.0


@pytest.mark.parametrize("count", [0, 1, 49, 50, 51, 99, 100, 101, 1000, 5000])
def test_newest_entries_are_listed_and_the_rest_counted(count: int) -> None:
    """However many come: they are thrown away as they come."""
    each = 7
    reports = {}
    for number in range(0, count, each):
        some = range(number, min(count, number + each))
        reports[f"w{number}"] = training(
            now_s=10_000.0,
            passes=[backward_pass(float((at * 37) % 9999)) for at in some],
            steps=[optimizer_step(float((at * 37) % 9999)) for at in some],
        )
    ages = sorted(10_000.0 - (at * 37) % 9999 for at in range(count))
    answer = passes(reports)
    assert [entry["age_s"] for entry in answer["passes"]] == ages[:PASSES_MAX]
    assert answer["passes_left_out"] == max(0, count - PASSES_MAX)
    answer = steps(reports)
    assert [entry["age_s"] for entry in answer["steps"]] == ages[:STEPS_MAX]
    assert answer["steps_left_out"] == max(0, count - STEPS_MAX)


@pytest.mark.parametrize(("more", "ended"), [(-1, 1), (0, 0), (1, 0)])
def test_running_passes_push_out_ended_ones(more: int, ended: int) -> None:
    count = PASSES_MAX + more
    reports = {
        "a": training(
            passes=[backward_pass(99.0)] * 3,
            under_way=[pass_under_way(float(at)) for at in range(count)],
        )
    }
    answer = passes(reports)
    states = [entry["state"] for entry in answer["passes"]]
    assert states == ["under way"] * (PASSES_MAX - ended) + ["committed"] * ended
    assert answer["passes"][0]["age_s"] == count - 1
    assert answer["passes_left_out"] == count + 3 - PASSES_MAX


def test_step_lists_a_limited_number_of_owners() -> None:
    owners = tuple(f"w{number}" for number in range(STAGES_MAX + 5))
    reports = {"a": training(steps=[optimizer_step(99.0, owners=owners)])}
    keys = "worker optimizer owners owners_left_out state age_s took_s"
    assert told.rows_of(steps(reports)["steps"], keys) == [
        ("a", "SGD", list(owners[:STAGES_MAX]), 5, "ok", 1.0, 0.25)
    ]


def test_entries_of_a_worker_are_one_slice() -> None:
    reports = {
        "a": training(passes=[backward_pass(1.0)] * 3, under_way=[pass_under_way(1.0)]),
        "b": training(steps=[optimizer_step(1.0)] * 5),
    }
    assert done(passes_of(reports))[1] == [4, 0]
    assert done(steps_of(reports))[1] == [0, 5]


# --- pipelines -----------------------------------------------------------------------


def test_step_is_drawn_from_its_own_start() -> None:
    answer = pipeline(
        {
            "b": training(stages=[stage(1, began_s=10.5)]),
            "a": training(stages=[stage(0, began_s=10.0)]),
        }
    )
    assert column(answer["pipeline"], "worker") == ["a", "b"]
    assert column(answer["pipeline"], "stage") == [0, 1]
    spans = told.rows_of(answer["pipeline"][1]["spans"], "kind chunk start_s end_s")
    assert spans == [("forward", 0, 0.5, 1.0), ("backward", 0, 1.0, 1.5)]
    assert answer["pipeline"][0]["busy_share"] == pytest.approx(1 / 1.5)
    keys = "number schedule stages told left_out took_s is_of_one_clock bubble"
    (step,) = told.rows_of([answer["pipeline_step"]], keys)
    assert step == (1, "1f1b", 2, 2, 0, 1.5, True, pytest.approx(1 / 3))


def test_clocks_of_several_hosts_are_aligned_by_report_time() -> None:
    answer = pipeline(
        {
            "a": training(stages=[stage(0, began_s=10.0)], host_id="h", came_s=100.0),
            "b": training(
                stages=[stage(1, began_s=1010.0)],
                host_id="i",
                now_s=1100.0,
                came_s=100.25,
            ),
        }
    )
    assert [lane["spans"][0]["start_s"] for lane in answer["pipeline"]] == [0.0, 0.25]
    assert not answer["pipeline_step"]["is_of_one_clock"]


def test_step_reported_by_most_stages_is_shown_latest_first() -> None:
    def number_of(*stages: tuple[str, Any]) -> int:
        reports: dict[str, list[Any]] = {}
        for name, stage_seen in stages:
            reports.setdefault(name, []).append(stage_seen)
        answer = pipeline({name: training(stages=it) for name, it in reports.items()})
        number: int = answer["pipeline_step"]["number"]
        return number

    whole = [("a", stage(0, number=1)), ("b", stage(1, number=1))]
    newer = ("a", stage(0, number=2, began_s=50.0))
    assert number_of(*whole, newer) == 1
    newer_whole = [newer, ("b", stage(1, number=2, began_s=50.0))]
    assert number_of(*whole, *newer_whole) == 2
    assert number_of(*newer_whole, *whole) == 2
    same = [("a", stage(0, number=3)), ("b", stage(1, number=3))]
    assert number_of(*whole, *same) == 1  # of what is alike the first
    assert number_of(*same, *whole) == 3


def test_steps_are_identified_by_context_number_and_stages() -> None:
    steps = [
        stage(0),
        stage(0, number=2),
        stage(0, context="d"),
        stage(0, stages=3),
    ]
    assert pipeline({"a": training(stages=steps)})["pipeline_step"]["told"] == 1


def test_step_without_computations_takes_no_time() -> None:
    answer = pipeline({"a": training(stages=[stage(0, 1, spans=[])])})
    keys = "stage worker busy_share spans spans_left_out"
    assert told.rows_of(answer["pipeline"], keys) == [(0, "a", None, [], 0)]
    assert answer["pipeline_step"]["took_s"] == 0.0
    assert answer["pipeline_step"]["bubble"] is None


def test_computations_of_no_length_take_no_time() -> None:
    at_once = [span("forward", 0.5, 0.5)]
    answer = pipeline({"a": training(stages=[stage(0, 1, spans=at_once)])})
    assert answer["pipeline"][0]["busy_share"] is None


@pytest.mark.parametrize(
    ("spans", "share"),
    [
        ([span("forward", 0.0, 1.0)], 1.0),
        ([span("forward", 0.0, 1.0)] * 3, 1.0),  # no more than all of the time
        ([span("forward", 0.0, 1.0), span("backward", 1.0, -9.0)], 0.0),
    ],
)
def test_busy_share_stays_between_0_and_1(spans: list[Any], share: float) -> None:
    answer = pipeline({"a": training(stages=[stage(0, 1, spans=spans)])})
    assert answer["pipeline"][0]["busy_share"] == share
    assert answer["pipeline_step"]["bubble"] == 1 - share


@pytest.mark.parametrize("value", [*NO_NUMBERS, TIME_MAX_S, -TIME_MAX_S, 1e308, -1e308])
@pytest.mark.parametrize("place", ["began_s", "start_s", "end_s"])
def test_stage_with_impossible_times_is_left_out(place: str, value: float) -> None:
    changed: Any = {place: value}
    odd = (
        stage(0, **changed)
        if place == "began_s"
        else stage(0, spans=[span("forward", 0.0, 1.0)._replace(**changed)])
    )
    answer = pipeline({"a": training(stages=[odd]), "b": training(stages=[stage(1)])})
    assert [lane["worker"] for lane in answer["pipeline"]] == ["b"]
    as_sent(answer)


@pytest.mark.parametrize("value", NO_NUMBERS)
def test_stage_of_a_worker_with_an_impossible_clock_is_left_out(value: float) -> None:
    answer = pipeline(
        {
            "a": training(stages=[stage(0)], now_s=value, host_id="h"),
            "b": training(stages=[stage(1)], host_id="i"),
        }
    )
    assert [lane["worker"] for lane in answer["pipeline"]] == ["b"]


@pytest.mark.parametrize("count", [STAGES_MAX, STAGES_MAX + 1, 1000])
def test_drawn_stages_are_limited_and_the_rest_counted(count: int) -> None:
    reports = {
        f"w{number}": training(stages=[stage(number, count)])
        for number in reversed(range(count))
    }
    answer = pipeline(reports)
    assert [lane["stage"] for lane in answer["pipeline"]] == list(range(STAGES_MAX))
    assert answer["pipeline_step"]["told"] == STAGES_MAX
    assert answer["pipeline_step"]["left_out"] == count - STAGES_MAX


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("more", [0, 1])
def test_drawn_computations_are_limited_and_the_rest_counted(
    stages: int, more: int
) -> None:
    most = SPANS_MAX // stages
    spans = [span("forward", 0.0, 1.0, chunk) for chunk in range(most + more)]
    reports = {
        f"w{number}": training(stages=[stage(number, stages, spans=spans)])
        for number in range(stages)
    }
    for lane in pipeline(reports)["pipeline"]:
        assert [it["chunk"] for it in lane["spans"]] == list(range(most))
        assert lane["spans_left_out"] == more


def test_pipelines_of_many_workers_come_in_slices() -> None:
    spans = [span("forward", 0.0, 1.0)] * 32
    reports = {
        f"w{number}": training(stages=[stage(number, 1000, spans=spans)])
        for number in range(1000)
    }
    _, sizes = done(pipeline_of(reports))
    assert max(sizes) <= SLICE_MAX
    assert sum(sizes) == 33 * 1000 + 32 * STAGES_MAX


def test_stage_of_many_computations_is_a_slice_of_its_own() -> None:
    spans = [span("forward", 0.0, 1.0)] * (SPANS_MAX + 1)
    _, sizes = done(pipeline_of({"a": training(stages=[stage(0, 1, spans=spans)])}))
    assert sizes == [SPANS_MAX + 2, SPANS_MAX]
