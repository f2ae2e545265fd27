"""A timeline: spans on the tracks of their tasks, arrows between the ends of things."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrpc.core.ids import MessageId, WorkerId
from asyncrpc.core.trace.events import (
    BackwardPassEnded,
    BackwardSegmentEnded,
    BucketReduced,
    CallEnded,
    CallServed,
    CollectiveEnded,
    LinkChanged,
    MembershipChanged,
    MemoryChanged,
    OptimizerStepEnded,
    StreamReceived,
    StreamSent,
    call_label,
)
from asyncrpc.core.trace.ring import RECENT_MAX
from asyncrpc.tools.inspection.events import NamedTask
from asyncrpc.tools.inspection.machine.profiles import (
    first_free_number,
    shift_to_profile,
)
from asyncrpc.tools.inspection.machine.spans import WorkerEvents
from asyncrpc.tools.inspection.machine.timeline import Timeline
from tests.unit.tools.inspection.machine.timelines import (
    A,
    B,
    call,
    check,
    events_of,
    of_phase,
    passed,
    recent,
    segment,
    served,
    tracks,
    worker,
)


class TestArrows:
    def test_call_is_a_span_at_both_ends_with_an_arrow(self) -> None:
        function = CallServed(12.0, 11.0, 11.5, A, "add", 1, "ok")
        events = events_of(
            worker(A, calls=[call(10.0, 13.0)]),
            worker(B, served=[function]),
            zero_s=10.0,
        )
        call_span, run = of_phase(events, "X")
        assert (call_span["pid"], call_span["ts"], call_span["dur"]) == (1, 0.0, 3e6)
        assert (run["pid"], run["ts"], run["dur"]) == (2, 1.5e6, 0.5e6)
        assert (call_span["name"], run["name"]) == ("add on b", "add")
        assert run["args"]["waited for a thread, us"] == 0.5e6
        (start,), (end,) = of_phase(events, "s"), of_phase(events, "f")
        assert start["id"] == end["id"]
        assert (start["pid"], end["pid"], end["bp"]) == (1, 2, "e")

    def test_call_without_its_other_end_has_no_arrow_and_is_counted(self) -> None:
        calls = [call(10.0, 13.0, 1), call(10.0, 13.0, 2), call(10.0, 10.0, 0)]
        timeline = Timeline(
            [worker(A, calls=calls), worker(B, served=[served(1.0, 2.0, 7)])],
            zero_s=0.0,
        )
        assert not of_phase(list(timeline.events()), "s")
        assert timeline.calls_alone == 3  # the one that was never sent has no other end
        assert timeline.spans == 4

    def test_stream_has_an_arrow(self) -> None:
        received = StreamReceived(13.0, 10.0, B, "rows", 4, "ok", 3, "main")
        sent = StreamSent(12.0, 11.0, A, "rows", 4, "cancelled", 2)
        events = events_of(worker(A, received=[received]), worker(B, sent=[sent]))
        names = [span["name"] for span in of_phase(events, "X")]
        assert names == ["rows on b", "rows: cancelled"]
        assert len(of_phase(events, "f")) == 1

    def test_gradient_arrow_starts_at_the_segment_that_computed_it(self) -> None:
        there, back = MessageId(A.incarnation, 1), MessageId(B.incarnation, 2)
        events = events_of(
            worker(
                A,
                passes=[passed(0.0, 9.0, "training")],
                segments=[
                    segment(1.0, 2.0, feeds=[back]),
                    segment(5.0, 6.0, fed_by=[there]),
                ],
            ),
            worker(
                B,
                passes=[passed(2.5, 8.0)],
                segments=[segment(3.0, 4.0, fed_by=[back], feeds=[there])],
            ),
        )
        check(events)
        arrows = {
            arrow["id"]: (arrow["pid"], arrow["ts"])
            for arrow in of_phase(events, "s")
            if arrow["name"] == "gradient"
        }
        ends = {
            arrow["id"]: (arrow["pid"], arrow["ts"]) for arrow in of_phase(events, "f")
        }
        assert {(arrows[arrow], ends[arrow]) for arrow in arrows} == {
            ((1, 1999999.999), (2, 3e6)),
            ((2, 3999999.999), (1, 5e6)),
        }

    def test_messages_between_two_segments_share_one_arrow(self) -> None:
        messages = [MessageId(B.incarnation, serial) for serial in range(5)]
        events = events_of(
            worker(A, segments=[segment(1.0, 2.0, feeds=messages)]),
            worker(B, segments=[segment(3.0, 4.0, fed_by=messages)]),
        )
        assert len(of_phase(events, "s")) == 1

    def test_gradient_arrow_starts_at_the_last_segment_before(self) -> None:
        message = MessageId(B.incarnation, 1)
        early, late = (
            segment(1.0, 2.0, feeds=[message]),
            segment(5.0, 6.0, feeds=[message]),
        )
        events = events_of(
            worker(A, segments=[early, late]),
            worker(
                B,
                segments=[
                    segment(3.0, 4.0, fed_by=[message]),
                    segment(7.0, 8.0, fed_by=[message]),
                ],
            ),
        )
        check(events)
        starts = sorted(arrow["ts"] for arrow in of_phase(events, "s"))
        assert starts == [1999999.999, 5999999.999]

    def test_gradient_arrow_stays_within_its_pass(self) -> None:
        message = MessageId(B.incarnation, 1)
        other = segment(3.0, 4.0, fed_by=[message])._replace(pass_number=6)
        events = events_of(
            worker(A, segments=[segment(1.0, 2.0, feeds=[message])]),
            worker(B, segments=[other]),
        )
        assert not of_phase(events, "s")

    def test_left_out_messages_are_reported(self) -> None:
        events = events_of(worker(A, segments=[segment(1.0, 2.0)._replace(left_out=3)]))
        (shown,) = of_phase(events, "X")
        assert shown["args"]["messages without arrows"] == 3


class TestTracks:
    def test_spans_of_a_task_are_on_its_track(self) -> None:
        step = OptimizerStepEnded(4.0, 2.0, "SGD", ("b",), "ok", "Task-7")
        events = events_of(
            worker(
                A,
                NamedTask("Task-7", "main.<locals>.train"),
                NamedTask("reader", "read"),
                calls=[
                    call(2.5, 3.5, 2, task="Task-7"),
                    call(0.0, 1.0, 1, task="Task-7"),
                    call(0.5, 1.5, 3, task="reader"),
                ],
                steps=[step],
            )
        )
        check(events)
        assert tracks(events) == {
            "reader: read": ["add on b"],
            "train (Task-7)": ["add on b", "SGD step", "add on b"],
        }

    def test_ended_task_has_a_track_if_it_made_several_calls(self) -> None:
        events = events_of(
            worker(
                A,
                calls=[
                    call(0.0, 1.0, 1, task="Task-1"),
                    call(1.0, 2.0, 2, task="Task-1"),
                    call(0.0, 1.0, 3, task="Task-2"),
                    call(0.5, 1.5, 4, task="Task-3"),
                ],
            )
        )
        assert tracks(events) == {
            "Task-1": ["add on b", "add on b"],
            "calls of short tasks #1": ["add on b"],
            "calls of short tasks #2": ["add on b"],
        }

    def test_overlapping_calls_of_a_task_have_tracks_beside_it(self) -> None:
        calls = [call(0.0, 10.0, 1, task="t"), call(1.0, 2.0, 2, task="t")]
        events = events_of(worker(A, NamedTask("t", ""), calls=calls))
        assert tracks(events) == {"t": ["add on b"], "t +1": ["add on b"]}

    def test_calls_of_a_served_function_are_below_it(self) -> None:
        label = call_label(1, "a")
        events = events_of(
            worker(
                B,
                served=[served(0.0, 9.0, 1), served(1.0, 8.0, 2)],
                calls=[
                    call(2.0, 3.0, 1, to=A, task=label),
                    call(4.0, 7.0, 2, to=A, task=label),
                    call(5.0, 6.0, 3, to=A, task=label),
                ],
            )
        )
        check(events)
        assert tracks(events) == {
            "served calls #1": ["add", "add on a", "add on a"],
            "served calls #1 +1": ["add on a"],
            "served calls #2": ["add"],
        }

    def test_calls_of_an_unfinished_function_have_its_track(self) -> None:
        label = call_label(1, "a")
        calls = [call(n, n + 1, n, to=A, task=label) for n in (1, 2)]
        assert tracks(events_of(worker(B, calls=calls))) == {label: ["add on a"] * 2}

    def test_segments_are_within_their_pass(self) -> None:
        here = worker(
            A,
            passes=[passed(0.0, 9.0, "training")],
            segments=[segment(1.0, 2.0)],
            calls=[call(2.0, 3.0, task="training")],
        )
        there = worker(B, passes=[passed(2.0, 8.0)], segments=[segment(3.0, 4.0)])
        within = ["backward pass", "backward"]
        assert tracks(events_of(there)) == {"backward passes": within}
        assert tracks(events_of(here)) == {"backward passes": [*within, "add on b"]}

    def test_segment_of_a_running_pass_is_drawn(self) -> None:
        events = events_of(worker(B, segments=[segment(3.0, 4.0)]))
        assert tracks(events) == {"backward passes": ["backward"]}

    def test_each_kind_of_span_has_its_name(self) -> None:
        collective = CollectiveEnded(
            *(2.0, 1.0, "g", "all_reduce", 3, 0, ("a", "b"), "torch.float32"),
            *((4, 4), "RankLostError", 7, ""),
        )
        events = events_of(
            worker(
                A,
                passes=[passed(1.0, 2.0, is_committed=False)],
                collectives=[collective],
                buckets=[BucketReduced(2.0, 1.0, 3, 64, "")],
            )
        )
        assert tracks(events) == {
            "collectives": ["all_reduce: RankLostError"],
            "buckets": ["bucket 3"],
            "backward passes": ["backward pass: dropped"],
        }


class TestClocks:
    def test_clocks_are_aligned(self) -> None:
        function = CallServed(112.0, 111.0, 111.5, A, "add", 1, "ok")
        events = events_of(
            worker(A, calls=[call(10.0, 13.0)]),
            worker(B, offset_s=-100.0, served=[function]),
            zero_s=10.0,
        )
        assert of_phase(events, "X")[1]["ts"] == 1.5e6

    def test_clock_error_is_shown_at_its_worker(self) -> None:
        events_of_a = WorkerEvents(A, recent(), 0.0, 25e-6, rank=3)
        assert (
            events_of(events_of_a)[0]["args"]["name"]
            == "rank 3: a (clock to within 25 us)"
        )
        assert Timeline([events_of_a], zero_s=0.0).error_s == 25e-6

    @pytest.mark.parametrize(
        ("came_s", "ended_s", "wrong_s"),
        [(10.5, 12.5, 0.0), (9.0, 12.0, 1.0), (11.0, 15.0, 2.0)],
    )
    def test_call_served_out_of_its_time_shows_the_clock_error(
        self, came_s: float, ended_s: float, wrong_s: float
    ) -> None:
        workers = [
            worker(A, calls=[call(10.0, 13.0)]),
            worker(B, served=[served(came_s, ended_s)]),
        ]
        assert Timeline(workers, zero_s=0.0).backwards_s == wrong_s

    def test_abandoned_call_may_be_served_for_longer(self) -> None:
        given_up = call(10.0, 13.0)._replace(outcome="cancelled")
        workers = [worker(A, calls=[given_up]), worker(B, served=[served(11.0, 99.0)])]
        assert Timeline(workers, zero_s=0.0).backwards_s == 0.0


def test_memory_is_a_counter_and_links_are_instants() -> None:
    events = events_of(
        worker(
            A,
            links=[LinkChanged(1.0, B, "ended", "it has left")],
            membership=[MembershipChanged(1.0, B, "left")],
            memory=[
                MemoryChanged(1.0, "slab", "taken", 3 << 20),
                MemoryChanged(2.0, "slab", "returned", 1 << 20),
            ],
        )
    )
    assert [counter["args"]["MiB"] for counter in of_phase(events, "C")] == [3.0, 2.0]
    assert [
        (instant["name"], instant["args"]) for instant in of_phase(events, "i")
    ] == [
        ("link to b ended", {"reason": "it has left"}),
        ("b left", {}),
    ]


def test_worker_with_overwritten_events_is_named() -> None:
    many = [call(n, n + 0.5, n) for n in range(1, RECENT_MAX + 1)]
    workers = [worker(A, calls=many), worker(B, served=[served(1.0, 2.0)])]
    assert Timeline(workers, zero_s=0.0).full == ["a"]


def test_timeline_beside_a_profile_has_its_time_and_other_numbers() -> None:
    profile: dict[str, Any] = {
        "baseTimeNanoseconds": 5_000,
        "traceEvents": [
            {"ph": "X", "pid": 70, "tid": 900},
            {"ph": "X", "pid": "Spans", "tid": "Traces"},
            {"ph": "i"},
        ],
    }
    first = first_free_number(profile["traceEvents"])
    assert first == 901
    timeline = Timeline(
        [worker(A, calls=[call(10.0, 13.0)])],
        zero_s=10.0,
        first=first,
        shift_ns=shift_to_profile(profile, zero_wall_ns=7_000),
    )
    (span,) = of_phase(list(timeline.events()), "X")
    assert (span["ts"], span["pid"]) == (2.0, 901)
    assert span["tid"] > 901


# --- properties ----------------------------------------------------------------------

TIMES = st.integers(0, 40)
TASKS = st.sampled_from(["", "t", "Task-1", call_label(1, "a"), call_label(2, "b")])
IDS = st.integers(0, 5)
MESSAGES = st.lists(st.builds(MessageId, st.sampled_from([1, 2]), IDS), max_size=3)


@st.composite
def spans_of_time(draw: st.DrawFn) -> tuple[float, float]:
    began = draw(TIMES)
    return (began + draw(st.integers(0, 15))) / 7, began / 7


@st.composite
def calls(draw: st.DrawFn, who: WorkerId, other: WorkerId) -> CallEnded:
    ended, began = draw(spans_of_time())
    fields = ended, began, draw(st.sampled_from([who, other])), "f", draw(IDS)
    return CallEnded(*fields, "ok", 0, 0, draw(TASKS))


@st.composite
def functions(draw: st.DrawFn, caller: WorkerId) -> CallServed:
    ended, began = draw(spans_of_time())
    return CallServed(ended, began, began, caller, "f", draw(IDS), "ok")


@st.composite
def segments(draw: st.DrawFn) -> BackwardSegmentEnded:
    ended, began = draw(spans_of_time())
    drawn = segment(began, ended, fed_by=draw(MESSAGES), feeds=draw(MESSAGES))
    return drawn._replace(pass_number=draw(st.integers(1, 2)))


@st.composite
def optimizer_steps(draw: st.DrawFn) -> OptimizerStepEnded:
    ended, began = draw(spans_of_time())
    return OptimizerStepEnded(ended, began, "SGD", (), "ok", draw(TASKS))


@st.composite
def passes(draw: st.DrawFn) -> BackwardPassEnded:
    ended, began = draw(spans_of_time())
    return passed(began, ended, draw(TASKS))._replace(pass_number=draw(IDS))


@st.composite
def workers(draw: st.DrawFn, who: WorkerId, other: WorkerId) -> WorkerEvents:
    """A worker that did anything, by a clock that is anything."""
    # Of one connection each call has another number.
    made_calls = draw(st.lists(calls(who, other), max_size=8))
    ran = draw(st.lists(functions(other), max_size=8))
    return worker(
        who,
        *draw(st.sampled_from([(), (NamedTask("t", "train"),)])),
        offset_s=draw(TIMES) / 13,
        calls=list({(call.to, call.call_id): call for call in made_calls}.values()),
        served=list({call.call_id: call for call in ran}.values()),
        segments=draw(st.lists(segments(), max_size=8)),
        passes=draw(st.lists(passes(), max_size=4)),
        steps=draw(st.lists(optimizer_steps(), max_size=8)),
    )


@settings(max_examples=40)
@given(workers(A, B), workers(B, A), st.integers(0, 10**15))
def test_timeline_draws_every_event_by_the_rules_of_the_format(
    a: WorkerEvents, b: WorkerEvents, shift_ns: int
) -> None:
    timeline = Timeline([a, b], zero_s=0.0, shift_ns=shift_ns)
    events = list(timeline.events())
    check(events)
    given_spans = sum(
        len(getattr(side.recent, kind))
        for side in (a, b)
        for kind in ("calls", "served", "segments", "passes", "steps")
    )
    assert len(of_phase(events, "X")) == given_spans == timeline.spans
    assert len(of_phase(events, "f")) == timeline.arrows
    made_calls = [*a.recent.calls, *b.recent.calls]
    ends = sum(call.call_id > 0 for call in made_calls)
    ends += len(a.recent.served) + len(b.recent.served)
    joined = sum(arrow["name"] == "call" for arrow in of_phase(events, "f"))
    assert ends == timeline.calls_alone + 2 * joined
