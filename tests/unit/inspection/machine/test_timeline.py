"""A timeline: what overlaps lies on rows of its own, arrows join the ends of a call."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrpc.ids import ContextId, Incarnation, WorkerId
from asyncrpc.inspection.events import KIND_NAMES, RecentEvents
from asyncrpc.inspection.machine.timeline import (
    WorkerEvents,
    beside_profile,
    rows_for,
    timeline_of,
)
from asyncrpc.trace.events import (
    BackwardPassEnded,
    CallEnded,
    CallServed,
    CollectiveEnded,
    LinkChanged,
    MemoryChanged,
    StreamReceived,
    StreamSent,
)

A, B = WorkerId("a", Incarnation(1)), WorkerId("b", Incarnation(2))


def recent(**events: list[Any]) -> RecentEvents:
    return RecentEvents(100.0, 0, **{name: events.get(name, []) for name in KIND_NAMES})


def worker(
    who: WorkerId, *, offset_s: float = 0.0, **events: list[Any]
) -> WorkerEvents:
    return WorkerEvents(who, recent(**events), offset_s, 0.0)


def of_phase(told: list[dict[str, Any]], phase: str) -> list[dict[str, Any]]:
    return [one for one in told if one["ph"] == phase]


def call(began_s: float, ended_s: float, call_id: int = 1) -> CallEnded:
    return CallEnded(ended_s, began_s, B, "add", call_id, "ok", 8, 4)


def test_a_call_is_a_span_at_both_ends_with_an_arrow() -> None:
    served = CallServed(12.0, 11.0, 11.5, A, "add", 1, "ok")
    told = timeline_of(
        [worker(A, calls=[call(10.0, 13.0)]), worker(B, served=[served])], zero_s=10.0
    )
    made, run = of_phase(told, "X")
    assert (made["pid"], made["ts"], made["dur"]) == (1, 0.0, 3e6)
    assert (run["pid"], run["ts"], run["dur"]) == (2, 1.5e6, 0.5e6)
    assert run["args"]["waited_us"] == 0.5e6
    (start,), (end,) = of_phase(told, "s"), of_phase(told, "f")
    assert start["id"] == end["id"]
    assert (start["pid"], end["pid"], end["bp"]) == (1, 2, "e")


def test_without_its_other_end_a_call_has_no_arrow() -> None:
    told = timeline_of([worker(A, calls=[call(10.0, 13.0)])], zero_s=0.0)
    assert not of_phase(told, "s")


def test_a_stream_has_an_arrow_too() -> None:
    received = StreamReceived(13.0, 10.0, B, "rows", 4, "ok", 3)
    sent = StreamSent(12.0, 11.0, A, "rows", 4, "cancelled", 2)
    told = timeline_of(
        [worker(A, received=[received]), worker(B, sent=[sent])], zero_s=0.0
    )
    assert [one["name"] for one in of_phase(told, "X")] == ["rows", "rows: cancelled"]
    assert len(of_phase(told, "f")) == 1


def test_clocks_are_put_in_line() -> None:
    served = CallServed(112.0, 111.0, 111.5, A, "add", 1, "ok")
    told = timeline_of(
        [
            worker(A, calls=[call(10.0, 13.0)]),
            worker(B, offset_s=-100.0, served=[served]),
        ],
        zero_s=10.0,
    )
    assert of_phase(told, "X")[1]["ts"] == 1.5e6


def test_how_wrong_a_clock_may_be_stands_at_its_worker() -> None:
    told = timeline_of([WorkerEvents(A, recent(), 0.0, 25e-6)], zero_s=0.0)
    assert told[0]["args"]["name"] == "a (clock to within 25 us)"


def test_calls_that_overlap_have_rows_of_their_own() -> None:
    calls = [call(0.0, 10.0, 1), call(1.0, 2.0, 2), call(3.0, 4.0, 3)]
    told = timeline_of([worker(A, calls=calls)], zero_s=0.0)
    rows = {one["tid"]: one["args"]["name"] for one in of_phase(told, "M")[2:]}
    assert rows == {1: "calls 1", 2: "calls 2"}
    assert [one["tid"] for one in of_phase(told, "X")] == [1, 2, 2]


def test_each_kind_of_training_has_its_name() -> None:
    told = timeline_of(
        [
            worker(
                A,
                passes=[
                    BackwardPassEnded(
                        *(2.0, 1.0, ContextId(Incarnation(1), 1)),
                        root="a",
                        is_committed=False,
                    )
                ],
                collectives=[
                    CollectiveEnded(
                        *(2.0, 1.0, "g", "all_reduce", 3, 0, ("a", "b")),
                        *("torch.float32", (4, 4), "RankLostError", 7),
                    )
                ],
            )
        ],
        zero_s=0.0,
    )
    names = [one["name"] for one in of_phase(told, "X")]
    assert names == ["backward pass: dropped", "all_reduce: RankLostError"]


def test_memory_is_added_up_and_links_are_moments() -> None:
    told = timeline_of(
        [
            worker(
                A,
                links=[LinkChanged(1.0, B, "ended", "it has left")],
                memory=[
                    MemoryChanged(1.0, "slab", "taken", 3 << 20),
                    MemoryChanged(2.0, "slab", "returned", 1 << 20),
                ],
            )
        ],
        zero_s=0.0,
    )
    assert [one["args"]["MiB"] for one in of_phase(told, "C")] == [3.0, 2.0]
    (moment,) = of_phase(told, "i")
    assert (moment["name"], moment["args"]) == (
        "link to b ended",
        {"reason": "it has left"},
    )


def test_a_profile_keeps_its_own_time() -> None:
    told = timeline_of([worker(A, calls=[call(10.0, 13.0)])], zero_s=10.0)
    profile = {"baseTimeNanoseconds": 5_000, "traceEvents": [{"ph": "X", "pid": 1}]}
    merged = beside_profile(told, profile, zero_wall_ns=7_000)
    spans = [one for one in merged["traceEvents"] if one.get("name") == "add"]
    assert spans[0]["ts"] == 2.0
    assert spans[0]["pid"] == "asyncrpc 1"  # the profile has a process 1


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), max_size=60))
def test_no_two_intervals_on_a_row_overlap(found: list[tuple[int, int]]) -> None:
    intervals = sorted((float(at), float(at + long)) for at, long in found)
    rows = rows_for(intervals)
    for row in set(rows):
        mine = [one for one, on in zip(intervals, rows, strict=True) if on == row]
        for (_, ended), (began, _) in itertools.pairwise(mine):
            assert ended <= began
    most = max(
        (sum(began <= at < ended for began, ended in intervals) for at, _ in intervals),
        default=0,
    )
    assert len(set(rows)) <= most


@pytest.mark.parametrize("count", [64, 100])
def test_rows_have_a_limit(count: int) -> None:
    assert max(rows_for([(0.0, 1.0)] * count)) == 63
