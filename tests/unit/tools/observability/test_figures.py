"""Events of a flight recorder become figures, each once, in a bounded number."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrpc.core.ids import ContextId, Incarnation, RRefId, WorkerId
from asyncrpc.tools.observability import definitions as d
from asyncrpc.tools.observability.definitions import MetricDefinition
from asyncrpc.tools.observability.figures import (
    FOLDED_MIN,
    METHODS_MAX,
    OTHER,
    OUTCOMES_MAX,
    SERIES_MAX,
    VALUE_CHARACTERS_MAX,
    EventQueue,
    Fields,
    LabelCap,
    MetricSeries,
    SeriesSnapshot,
    Total,
    WorkerFigures,
)
from asyncrpc.tools.observability.histograms import (
    BYTES_BOUNDS,
    ITEMS_BOUNDS,
    SECONDS_BOUNDS,
    Histogram,
)
from asyncrpc.trace import OK, CollectiveEnded, FlightRecorder

B = WorkerId("b", Incarnation(2))


def listening(peers_max: int = 0) -> tuple[FlightRecorder, WorkerFigures]:
    recorder, figures = FlightRecorder(), WorkerFigures(peers_max)
    figures.listen(recorder)
    return recorder, figures


def call(
    recorder: FlightRecorder,
    function: str = "f",
    outcome: str = OK,
    *,
    spent_s: float = 0.5,
    to: WorkerId = B,
    bytes_sent: int = 0,
) -> None:
    fields = (10.0 + spent_s, 10.0, to, function, 1, outcome, bytes_sent, 0, "t")
    recorder.calls.record(fields)


def series_of(
    figures: WorkerFigures, metric: MetricDefinition
) -> dict[tuple[str, ...], SeriesSnapshot]:
    return {series.values: series for series in figures.snapshot()[metric]}


def counts(
    figures: WorkerFigures, metric: MetricDefinition
) -> dict[tuple[str, ...], int]:
    series = series_of(figures, metric).items()
    return {values: total.counts[-1] for values, total in series}


def test_calls_count_by_method_and_outcome() -> None:
    recorder, figures = listening()
    call(recorder, spent_s=0.0004)
    call(recorder, spent_s=0.3)
    call(recorder, outcome="RemoteError")
    call(recorder, "g", "cancelled")
    assert counts(figures, d.CLIENT_DURATION) == {
        ("f", ""): 2,
        ("f", "RemoteError"): 1,
        ("g", "cancelled"): 1,
    }
    durations = series_of(figures, d.CLIENT_DURATION)["f", ""]
    assert abs(durations.total - 0.3004) < 1e-9
    assert durations.counts[d.CLIENT_DURATION.bounds.index(0.0005)] == 1


def test_sizes_count_calls_with_buffers_only() -> None:
    recorder, figures = listening()
    call(recorder, bytes_sent=0)
    call(recorder, bytes_sent=2000)
    sizes = series_of(figures, d.REQUEST_SIZE)["f",]
    assert (sizes.counts[0], sizes.counts[1], sizes.counts[-1]) == (0, 1, 1)
    assert sizes.total == 2000
    assert series_of(figures, d.RESPONSE_SIZE) == {}


def test_queue_duration_is_the_time_before_the_function_began() -> None:
    recorder, figures = listening()
    recorder.served.record((13.0, 10.0, 12.0, B, "f", 1, OK))
    assert series_of(figures, d.QUEUE_DURATION)["f",].total == 2.0
    assert series_of(figures, d.SERVER_DURATION)["f", ""].total == 3.0


def test_peers_have_labels_on_request_up_to_the_limit() -> None:
    recorder, figures = listening(peers_max=2)
    for number in range(5):
        peer = WorkerId(f"w{number}", Incarnation(number))
        call(recorder, to=peer)
        recorder.served.record((13.0, 10.0, 12.0, peer, "f", 1, OK))
    expected = {("w0", ""): 1, ("w1", ""): 1, (OTHER, ""): 3}
    assert counts(figures, d.PEER_DURATION) == expected
    assert counts(figures, d.CALLER_DURATION) == expected


def test_peers_have_no_labels_by_default() -> None:
    recorder, figures = listening()
    call(recorder)
    assert series_of(figures, d.PEER_DURATION) == {}


def test_number_of_series_is_bounded_for_ten_thousand_methods() -> None:
    recorder, figures = listening(peers_max=10)
    methods = 10_000
    for number in range(methods):
        name, error = f"f{number}", f"Error{number % 100}"
        call(recorder, name, bytes_sent=1)
        call(recorder, name, error)
        recorder.served.record((13.0, 10.0, 12.0, B, name, 1, error))
        recorder.sent.record((13.0, 10.0, B, name, 1, error, 3))
        recorder.received.record((13.0, 10.0, B, name, 1, error, 3, "t"))
        event = (1.0, 0.0, "g", name, 0, 0, (), "", None, error, 7, "t")
        recorder.collectives.record(event)
        recorder.steps.record((1.0, 0.0, name, (), error, "t"))
    series_max = SERIES_MAX + OUTCOMES_MAX + 2
    snapshot = figures.snapshot()
    assert max(len(series) for series in snapshot.values()) <= series_max
    assert len(snapshot[d.REQUEST_SIZE]) == METHODS_MAX + 1
    assert sum(counts(figures, d.CLIENT_DURATION).values()) == 2 * methods
    assert counts(figures, d.CLIENT_DURATION)[OTHER, ""] == methods - METHODS_MAX


def test_streams_count_their_time_and_items() -> None:
    recorder, figures = listening()
    recorder.received.record((12.0, 10.0, B, "s", 1, OK, 7, "t"))
    recorder.sent.record((13.0, 10.0, B, "s", 1, "cancelled", 3))
    assert series_of(figures, d.CLIENT_STREAM_DURATION)["s", ""].total == 2.0
    assert series_of(figures, d.CLIENT_STREAM_ITEMS)["s",].total == 7
    assert series_of(figures, d.SERVER_STREAM_DURATION)["s", "cancelled"].total == 3.0
    assert series_of(figures, d.SERVER_STREAM_ITEMS)["s",].total == 3


def test_training_events_count_by_kind_and_outcome() -> None:
    recorder, figures = listening()
    context = ContextId(Incarnation(1), 1)
    recorder.passes.record((2.0, 1.0, context, "a", True, 1, "t"))
    recorder.passes.record((2.0, 1.0, context, "a", False, 2, "t"))
    recorder.steps.record((2.0, 1.0, "SGD", ("b",), "skipped", "t"))
    recorder.collectives.record(
        CollectiveEnded(
            *(2.0, 1.0, "group", "all_reduce", 0, 0, ("a", "b"), "float32", (2,)),
            *(OK, 7, "t"),
        )
    )
    recorder.buckets.record((1.5, 1.0, 0, 4096, "t"))
    assert counts(figures, d.PASS_DURATION) == {("committed",): 1, ("dropped",): 1}
    assert counts(figures, d.STEP_DURATION) == {("SGD", "skipped"): 1}
    assert counts(figures, d.COLLECTIVE_DURATION) == {("all_reduce", OK): 1}
    assert series_of(figures, d.BUCKET_DURATION)[()].total == 0.5
    assert series_of(figures, d.BUCKET_BYTES)[()].total == 4096


def test_changes_count_by_their_subject() -> None:
    recorder, figures = listening()
    value = RRefId(Incarnation(1), 1)
    recorder.references.record((1.0, value, "made"))
    recorder.references.record((1.0, value, "freed"))
    recorder.links.record((1.0, B, "opened", ""))
    recorder.membership.record((1.0, B, "joined"))
    recorder.memory.record((1.0, "slab", "taken", 10))
    recorder.memory.record((1.0, "peer's slab", "returned", 10))
    assert set(series_of(figures, d.REFERENCES_CHANGED)) == {("made",), ("freed",)}
    assert series_of(figures, d.LINKS_CHANGED)["opened",].total == 1
    assert series_of(figures, d.MEMBERS_CHANGED)["joined",].total == 1
    changed = series_of(figures, d.SHARED_MEMORY_CHANGED)
    assert set(changed) == {("own", "taken"), ("peers", "returned")}


def test_ended_figures_count_no_more_and_cost_nothing() -> None:
    recorder, figures = listening()
    before = FlightRecorder().calls.record.__name__  # that of a deque
    call(recorder)
    figures.end(recorder)
    figures.end(recorder)
    call(recorder)
    assert counts(figures, d.CLIENT_DURATION) == {("f", ""): 1}
    for ring in vars(recorder).values():
        if hasattr(ring, "record"):
            assert ring.record.__name__ == before


@pytest.mark.parametrize("bounds", [SECONDS_BOUNDS, BYTES_BOUNDS, ITEMS_BOUNDS])
def test_histogram_bounds_ascend(bounds: tuple[float, ...]) -> None:
    assert all(bound < next_one for bound, next_one in pairwise(bounds))


def test_bound_belongs_to_its_bucket() -> None:
    histogram = Histogram((1.0, 2.0))
    histogram.observe((0.0, 1.0, 1.5, 2.0, 2.1))
    assert histogram.counts == [2, 2, 1]
    assert histogram.cumulative() == [2, 4, 5]
    assert histogram.total == pytest.approx(6.6)


@given(st.lists(st.floats(0, 1e9, allow_nan=False)))
def test_cumulative_count_is_the_values_up_to_the_bound(values: list[float]) -> None:
    histogram = Histogram(SECONDS_BOUNDS)
    histogram.observe(values)
    expected = [sum(value <= bound for value in values) for bound in SECONDS_BOUNDS]
    assert histogram.cumulative() == [*expected, len(values)]


def test_label_beyond_the_cap_is_other() -> None:
    cap = LabelCap(2)
    assert [cap.shown(label) for label in "abcab"] == ["a", "b", OTHER, "a", "b"]
    assert cap.shown("") == ""


def test_label_cap_of_zero_shows_no_label() -> None:
    assert LabelCap(0).shown("a") == OTHER


def test_capped_series_lose_no_count() -> None:
    series = MetricSeries(Total, [LabelCap(METHODS_MAX), LabelCap(OUTCOMES_MAX)])
    for method, outcome in itertools.product(range(10_000), range(30)):
        series.at(str(method), str(outcome)).value += 1
    assert sum(total.value for total in series.by_values.values()) == 300_000
    assert len(series.by_values) <= SERIES_MAX + OUTCOMES_MAX + 2
    assert {method for method, _ in series.by_values} <= {
        OTHER,
        *map(str, range(METHODS_MAX)),
    }


def test_overflowing_label_keeps_no_memory() -> None:
    cap = LabelCap(1)
    series = MetricSeries(Total, [cap])
    for number in range(1000):
        series.at(str(number))
    assert len(series.by_values) == 2
    assert len(vars(cap)["_known"]) == 2


def test_label_value_is_made_encodable_and_short() -> None:
    cap = LabelCap(3)
    assert cap.shown("\ud800") == "?"
    assert cap.shown("ü") == "ü"
    assert len(cap.shown("n" * 10_000)) == VALUE_CHARACTERS_MAX


class Folded:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.events: list[Fields] = []
        self.queue = EventQueue(self.fold, self.lock)

    def fold(self, events: Iterable[Fields]) -> None:
        assert self.lock.locked()
        self.events += events

    def read(self) -> list[Fields]:
        with self.lock:
            self.queue.drain()
            return self.events


def test_few_events_are_folded_by_the_reader() -> None:
    folded = Folded()
    folded.queue.put((1,))
    assert folded.events == []
    assert folded.read() == [(1,)]


def test_many_events_are_folded_by_the_writer() -> None:
    folded = Folded()
    for number in range(FOLDED_MIN):
        folded.queue.put((number,))
    assert folded.events == [(number,) for number in range(FOLDED_MIN)]


def test_writer_does_not_wait_for_the_reader() -> None:
    folded = Folded()
    with folded.lock:
        for number in range(3 * FOLDED_MIN):
            folded.queue.put((number,))
        assert folded.events == []
    folded.queue.put((-1,))
    assert len(folded.events) == 3 * FOLDED_MIN + 1


def test_events_of_several_threads_are_counted_once_each() -> None:
    folded = Folded()
    each, threads = 5_000, 4

    def note(first: int) -> None:
        for number in range(first, first + each):
            folded.queue.put((number,))
            if not number % 100:
                folded.read()

    running = [
        threading.Thread(target=note, args=(number * each,))
        for number in range(threads)
    ]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert sorted(folded.read()) == [(number,) for number in range(each * threads)]
