"""A profile keeps what it has; calls in it that overlap get tracks of their own."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from asyncrpc.tools.inspection.machine.profiles import calls_apart, first_free_number
from tests.unit.tools.inspection.machine.timelines import check


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
