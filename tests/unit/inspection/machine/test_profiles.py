"""A profile keeps what it has; calls in it that overlap get tracks of their own."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from asyncrpc.inspection.machine.profiles import calls_apart, first_free_number
from tests.unit.inspection.machine.timelines import check


def shown(name: str, began: float, long: float, tid: Any = 7) -> dict[str, Any]:
    return {"ph": "X", "pid": 7, "tid": tid, "name": name, "ts": began, "dur": long}


def test_nested_calls_keep_their_track() -> None:
    events = [shown("rpc_async#f(a -> b)", 0, 9), shown("aten::add", 1, 2), {"ph": "i"}]
    assert calls_apart(events) == events


def test_overlapping_calls_get_tracks_of_their_own() -> None:
    operation = shown("aten::add", 1, 1)
    calls = [shown("rpc_async#f(a -> b)", 0, 9), shown("rpc_remote#g(a -> b)", 5, 9)]
    other = shown("rpc_async#h(a -> b)", 5, 9, tid="x")
    told = calls_apart([operation, *calls, other])
    assert told[0] == operation
    assert [one["tid"] for one in told[1:3]] == [8, 9]
    assert told[3] == other
    titles = [one["args"]["name"] for one in told[4:]]
    assert titles == ["calls of thread 7 #1", "calls of thread 7 #2"]


def test_overlapping_events_of_the_program_are_unchanged() -> None:
    events = [shown("step", 0, 9), shown("other", 5, 9)]
    assert calls_apart(events) == events


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 30), st.integers(0, 9))),
)
def test_calls_never_overlap_on_one_track(found: list[tuple[bool, int, int]]) -> None:
    events = [
        shown(f"rpc_{'run' if is_run else 'async'}#f", at, long)
        for is_run, at, long in found
    ]
    told = calls_apart(events)
    spans = [dict(one) for one in told if one["ph"] == "X"]
    assert len(spans) == len(events)
    check(sorted(spans, key=lambda one: (one["ts"], -one["dur"])))
    assert first_free_number(told) > max((one["tid"] for one in spans), default=0)
