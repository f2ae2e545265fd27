"""What the events of a flight recorder add up to."""

from __future__ import annotations

from asyncrpc.core.ids import ContextId, Incarnation, RRefId, WorkerId
from asyncrpc.tools.observability import definitions as d
from asyncrpc.tools.observability.definitions import MetricDefinition
from asyncrpc.tools.observability.figures import SeriesSnapshot, WorkerFigures
from asyncrpc.tools.observability.series import (
    METHODS_MAX,
    OTHER,
    OUTCOMES_MAX,
    SERIES_MAX,
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
    below_half_a_millisecond = d.CLIENT_DURATION.bounds.index(0.0005)
    assert durations.counts[below_half_a_millisecond] == 1


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
