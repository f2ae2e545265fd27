"""Spans and overlapping calls lie apart on tracks, on as few as may be."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrpc.tools.inspection.machine.profiles import calls_apart, first_free_number
from asyncrpc.tools.inspection.machine.spans import CALLS, PASSES, STEPS, TimelineSpan
from asyncrpc.tools.inspection.machine.tracks import (
    OWN_MAX,
    adopted,
    nested,
    rows_for,
    tracks_of,
)
from tests.unit.tools.inspection.machine.timelines import check

INTERVALS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=60)


def span(
    began: int, ended: int, *, task: str = "t", group: str = STEPS
) -> TimelineSpan:
    return TimelineSpan(group, "x", began, ended, task, {})


@given(INTERVALS)
def test_intervals_on_a_row_never_overlap(drawn: list[tuple[int, int]]) -> None:
    intervals = sorted((at, at + long + 1) for at, long in drawn)
    rows = rows_for(intervals)
    for row in set(rows):
        mine = [
            interval for interval, on in zip(intervals, rows, strict=True) if on == row
        ]
        for (_, ended), (began, _) in itertools.pairwise(mine):
            assert ended <= began
    most = max(
        (sum(began <= at < ended for began, ended in intervals) for at, _ in intervals),
        default=0,
    )
    assert len(set(rows)) <= most


@given(INTERVALS, st.randoms())
def test_call_spans_take_as_few_lanes_as_overlap(
    drawn: list[tuple[int, int]], order: object
) -> None:
    spans = [span(at, at + long, group=CALLS) for at, long in drawn]
    lanes = nested(spans)
    assert sorted(itertools.chain(*lanes)) == sorted(spans)
    for lane in lanes:
        for before, after in itertools.pairwise(lane):
            assert before.ended_ns <= after.began_ns


def test_contained_spans_share_the_lane() -> None:
    outer, inner, deep = span(0, 9), span(1, 8), span(2, 3)
    assert nested([deep, outer, inner]) == [[outer, inner, deep]]


def test_overlapping_span_gets_another_lane() -> None:
    assert nested([span(0, 5), span(3, 8)]) == [[span(0, 5)], [span(3, 8)]]


def test_consecutive_spans_are_not_nested() -> None:
    assert len(nested([span(0, 5), span(5, 5), span(5, 9)])) == 1


def message(began: int, ended: int, name: str = "optim.commit on b") -> TimelineSpan:
    return span(began, ended, task="Task-9", group=CALLS)._replace(name=name)


@pytest.mark.parametrize(
    ("around", "sent", "task"),
    [
        ([span(0, 9)], message(0, 9), "t"),
        ([span(0, 9)], message(3, 10), "Task-9"),  # it ends later
        ([span(0, 9)], message(3, 4, "add on b"), "Task-9"),  # a call of the program
        ([span(0, 9), span(2, 5, task="u")], message(6, 7), "Task-9"),
        ([span(0, 9), span(8, 12, task="u")], message(6, 9), "Task-9"),  # both overlap
        ([span(0, 9), span(9, 12, task="u")], message(6, 9), "t"),
        ([span(0, 9, group=PASSES)], message(6, 9), "Task-9"),  # of no step
        ([span(0, 9, group=PASSES)], message(6, 9, "autograd.advance on b"), "t"),
        ([], message(6, 9), "Task-9"),
    ],
)
def test_messages_of_a_step_are_on_its_track(
    around: list[TimelineSpan], sent: TimelineSpan, task: str
) -> None:
    (adopted_message,) = [
        span for span in adopted([*around, sent], {}) if span.group == CALLS
    ]
    assert adopted_message.task == task


def test_running_task_keeps_its_messages() -> None:
    sent = message(3, 4)
    assert sent in adopted([span(0, 9), sent], {"Task-9": "main"})


def test_tasks_share_tracks_beyond_a_limit() -> None:
    busy = [
        span(at, at + 1, task=f"task {number}", group=CALLS)
        for number in range(OWN_MAX + 10)
        for at in range(0, 10, 2)
    ]
    busy += [span(at, at + 1, task="task 0", group=CALLS) for at in range(20, 40, 2)]
    titles = [track.title for track in tracks_of(busy, {})]
    assert sum(title.startswith("task ") for title in titles) == OWN_MAX
    assert "task 0" in titles
    assert titles[OWN_MAX:] == [f"calls of short tasks #{n}" for n in range(1, 11)]
    assert sum(len(track.spans) for track in tracks_of(busy, {})) == len(busy)


def shown(name: str, began: float, long: float, tid: Any = 7) -> dict[str, Any]:
    return {"ph": "X", "pid": 7, "tid": tid, "name": name, "ts": began, "dur": long}


def test_nested_calls_keep_their_track() -> None:
    events = [shown("rpc_async#f(a -> b)", 0, 9), shown("aten::add", 1, 2), {"ph": "i"}]
    assert calls_apart(events) == events


def test_overlapping_calls_get_tracks_of_their_own() -> None:
    operation = shown("aten::add", 1, 1)
    calls = [shown("rpc_async#f(a -> b)", 0, 9), shown("rpc_remote#g(a -> b)", 5, 9)]
    other = shown("rpc_async#h(a -> b)", 5, 9, tid="x")
    shown_events = calls_apart([operation, *calls, other])
    assert shown_events[0] == operation
    assert [event["tid"] for event in shown_events[1:3]] == [8, 9]
    assert shown_events[3] == other
    titles = [event["args"]["name"] for event in shown_events[4:]]
    assert titles == ["calls of thread 7 #1", "calls of thread 7 #2"]


def test_overlapping_events_of_the_program_are_unchanged() -> None:
    events = [shown("step", 0, 9), shown("other", 5, 9)]
    assert calls_apart(events) == events


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 30), st.integers(0, 9))),
)
def test_calls_never_overlap_on_one_track(
    drawn_calls: list[tuple[bool, int, int]],
) -> None:
    events = [
        shown(f"rpc_{'run' if is_run else 'async'}#f", at, long)
        for is_run, at, long in drawn_calls
    ]
    shown_events = calls_apart(events)
    spans = [dict(event) for event in shown_events if event["ph"] == "X"]
    assert len(spans) == len(events)
    check(sorted(spans, key=lambda span: (span["ts"], -span["dur"])))
    assert first_free_number(shown_events) > max(
        (span["tid"] for span in spans), default=0
    )
