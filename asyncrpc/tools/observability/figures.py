"""The figures of one worker, summed from the events of its flight recorder.

Events go into the figures by `EventQueue`: nothing here runs unless the figures are
requested; then noting an event costs an append, and later its part of a fold.

Invariants: all folding and reading is done under one lock; no fold raises.

Events on their way from the flight recorder into figures.

Noting an event only appends it to a queue: without a lock or a wait, from any thread.
Now and then the noting thread folds the queue into the figures, unless another thread
is doing so; otherwise a later event or the next reader folds it.

The series of a metric: one figure for each set of values of its labels, bounded.

A program may call thousands of functions, and raise errors of classes that it makes at
run time.  Whatever it does, a metric has at most `SERIES_MAX` series, plus as many as
there are outcomes: further values count as `OTHER`.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeAlias, TypeVar

from asyncrpc.tools.observability import definitions as d
from asyncrpc.tools.observability.definitions import MetricDefinition
from asyncrpc.tools.observability.histograms import Histogram
from asyncrpc.trace import OK, FlightRecorder

OTHER: Final = "other"
SERIES_MAX: Final = 500  # of a metric; a histogram writes 21 lines for each
METHODS_MAX: Final = 100  # functions, or classes of optimizers, with their own series
OUTCOMES_MAX: Final = 20  # classes of errors with their own series
VALUE_CHARACTERS_MAX: Final = 200

F = TypeVar("F")


class Total:
    """A count that only grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0


class LabelCap:
    """The values of one label: a limited number, and `OTHER` for all further ones."""

    def __init__(self, values_max: int) -> None:
        self._values_max = values_max
        self._known: set[str] = {""}  # "no error" has its own series

    def shown(self, value: str) -> str:
        """Return the label that is shown for a value."""
        value = _printable(value)
        if value in self._known:
            return value
        if len(self._known) > self._values_max:
            return OTHER
        self._known.add(value)
        return value


class MetricSeries(Generic[F]):
    """The figures of one metric.

    Attributes:
        by_values: the figures by the values of the labels, as they are shown.
    """

    def __init__(self, make: Callable[[], F], caps: Sequence[LabelCap] = ()) -> None:
        """Begin without a series.

        Args:
            caps: for each label, the values with their own series; metrics may share a
                cap.
        """
        self.by_values: dict[tuple[str, ...], F] = {}
        self._make = make
        self._caps = caps

    def at(self, *values: str) -> F:
        """Return the figure for these values of the labels."""
        figure = self.by_values.get(values)
        # A value that is shown as another has no key, so the keys are bounded as well.
        return self._admitted(values) if figure is None else figure

    def _admitted(self, values: tuple[str, ...]) -> F:
        shown = tuple(
            cap.shown(value) for cap, value in zip(self._caps, values, strict=True)
        )
        if shown not in self.by_values and len(self.by_values) >= SERIES_MAX:
            shown = (OTHER, *shown[1:])
        figure = self.by_values.get(shown)
        if figure is None:
            figure = self.by_values[shown] = self._make()
        return figure


def _printable(value: str) -> str:
    """Return a value that can be written as UTF-8, and is not too long."""
    if len(value) > VALUE_CHARACTERS_MAX:
        value = value[:VALUE_CHARACTERS_MAX]
    return value if value.isascii() else value.encode(errors="replace").decode()


Fields: TypeAlias = tuple[Any, ...]

# Events that are folded together: 64 take 30 us, for which a call can wait.  An event
# costs 0.5 us so, or 0.8 that of a served call; folded alone it would be 1.5 and 2.4.
FOLDED_MIN: Final = 64


class EventQueue:
    """Events of one kind that are not in the figures yet; few."""

    __slots__ = ("_fold", "_lock", "_pending")

    def __init__(
        self, fold: Callable[[Iterable[Fields]], None], lock: threading.Lock
    ) -> None:
        """Begin empty.

        Args:
            lock: held while folding or reading; several queues may share it.
        """
        self._fold = fold
        self._lock = lock
        self._pending: deque[Fields] = deque()

    def put(self, fields: Fields) -> None:
        """Take an event; never waits.

        Thread safety: from any thread.
        """
        self._pending.append(fields)
        if len(self._pending) >= FOLDED_MIN and self._lock.acquire(blocking=False):
            try:
                self.drain()
            finally:
                self._lock.release()

    def drain(self) -> None:
        """Fold the queued events; the caller holds the lock."""
        take = self._pending.popleft
        self._fold([take() for _ in range(len(self._pending))])


Events: TypeAlias = Iterable[Fields]
Fold: TypeAlias = Callable[[Events], None]

# Values by method and outcome.
_Grouped: Final = defaultdict[tuple[str, str], list[float]]
_WORDS_MAX: Final = 20  # of our own: states, changes, operations of collectives
_SLABS: Final = {"slab": "own"}  # as the flight recorder names them


@dataclass(frozen=True, slots=True)
class SeriesSnapshot:
    """One series of a metric at one moment.

    Attributes:
        counts: of a histogram: how many values were at most each bound; else empty.
        total: sum of the values of a histogram; else the figure.
    """

    values: tuple[str, ...]
    counts: tuple[int, ...]
    total: float


class WorkerFigures:
    """The figures of one worker since they were first requested.

    Thread safety: all methods, from any thread.
    """

    def __init__(self, peers_max: int) -> None:
        self._lock = threading.Lock()
        self._series: dict[
            MetricDefinition, MetricSeries[Histogram] | MetricSeries[Total]
        ] = {}
        self._peers_max = peers_max
        methods, outcomes = LabelCap(METHODS_MAX), LabelCap(OUTCOMES_MAX)
        peers = LabelCap(peers_max)
        call, words = (methods, outcomes), LabelCap(_WORDS_MAX)
        self._calls = self._histograms(d.CLIENT_DURATION, *call)
        self._requests = self._histograms(d.REQUEST_SIZE, methods)
        self._responses = self._histograms(d.RESPONSE_SIZE, methods)
        self._callees = self._histograms(d.PEER_DURATION, peers, outcomes)
        self._served = self._histograms(d.SERVER_DURATION, *call)
        self._queued = self._histograms(d.QUEUE_DURATION, methods)
        self._callers = self._histograms(d.CALLER_DURATION, peers, outcomes)
        self._received = self._histograms(d.CLIENT_STREAM_DURATION, *call)
        self._received_items = self._histograms(d.CLIENT_STREAM_ITEMS, methods)
        self._sent = self._histograms(d.SERVER_STREAM_DURATION, *call)
        self._sent_items = self._histograms(d.SERVER_STREAM_ITEMS, methods)
        self._references = self._totals(d.REFERENCES_CHANGED, words)
        self._passes = self._histograms(d.PASS_DURATION, words)
        self._steps = self._histograms(
            d.STEP_DURATION, LabelCap(METHODS_MAX), LabelCap(OUTCOMES_MAX)
        )
        self._collectives = self._histograms(
            d.COLLECTIVE_DURATION, LabelCap(METHODS_MAX), LabelCap(OUTCOMES_MAX)
        )
        self._buckets = self._histograms(d.BUCKET_DURATION)
        self._bucket_bytes = self._totals(d.BUCKET_BYTES)
        self._links = self._totals(d.LINKS_CHANGED, words)
        self._members = self._totals(d.MEMBERS_CHANGED, words)
        self._memory = self._totals(d.SHARED_MEMORY_CHANGED, words, words)
        self._loop_lags = self._histograms(d.LOOP_LAG)
        self._gil_lags = self._histograms(d.GIL_LAG)
        for always in (self._buckets, self._bucket_bytes):
            always.at()
        self.loop_lags = EventQueue(self._fold_loop_lags, self._lock)
        self.gil_lags = EventQueue(self._fold_gil_lags, self._lock)
        self._queues: list[EventQueue] = [self.loop_lags, self.gil_lags]
        self._sinks: list[tuple[str, Callable[[Fields], None]]] = []

    def _histograms(
        self, definition: MetricDefinition, *caps: LabelCap
    ) -> MetricSeries[Histogram]:
        histograms = MetricSeries(lambda: Histogram(definition.bounds), caps)
        self._series[definition] = histograms
        return histograms

    def _totals(
        self, definition: MetricDefinition, *caps: LabelCap
    ) -> MetricSeries[Total]:
        totals = self._series[definition] = MetricSeries(Total, caps)
        return totals

    # --- listening and reading -------------------------------------------------------

    def listen(self, recorder: FlightRecorder) -> None:
        """Take the events of a worker from now on."""
        for name, fold in self._folds().items():
            queue = EventQueue(fold, self._lock)
            sink = queue.put  # bound once: each access makes another object
            self._queues.append(queue)
            self._sinks.append((name, sink))
            getattr(recorder, name).add_sink(sink)

    def end(self, recorder: FlightRecorder) -> None:
        """Take no more events; those already taken still count."""
        while self._sinks:
            name, sink = self._sinks.pop()
            getattr(recorder, name).remove_sink(sink)

    def snapshot(self) -> Mapping[MetricDefinition, list[SeriesSnapshot]]:
        """Return the present figures."""
        with self._lock:
            for queue in self._queues:
                queue.drain()
            return {
                definition: [
                    _snapshot(values, figure)
                    for values, figure in series.by_values.items()
                ]
                for definition, series in self._series.items()
            }

    def _folds(self) -> dict[str, Fold]:
        """Return the fold for the events of each ring of a recorder."""
        return {
            "calls": self._fold_calls,
            "served": self._fold_served,
            "received": self._fold_received,
            "sent": self._fold_sent,
            "references": self._fold_references,
            "passes": self._fold_passes,
            "steps": self._fold_steps,
            "collectives": self._fold_collectives,
            "buckets": self._fold_buckets,
            "links": self._fold_links,
            "membership": self._fold_members,
            "memory": self._fold_memory,
        }

    # --- calls -----------------------------------------------------------------------

    # Most events of one fold are alike, and are counted together.

    def _fold_calls(self, events: Events) -> None:
        spent = _Grouped(list)
        for at_s, began_s, to, function, _, outcome, sent, received, _ in events:
            spent[function, outcome].append(at_s - began_s)
            if sent:  # most calls have no buffers, and cost only this check
                self._requests.at(function).observe((sent,))
            if received:
                self._responses.at(function).observe((received,))
            if self._peers_max:
                self._callees.at(to[0], _error(outcome)).observe((at_s - began_s,))
        _count(self._calls, spent)

    def _fold_served(self, events: Events) -> None:
        spent, waited = _Grouped(list), _Grouped(list)
        for at_s, came_s, began_s, caller, function, _, outcome in events:
            key = (function, outcome)
            spent[key].append(at_s - came_s)
            waited[key].append(began_s - came_s)
            if self._peers_max:
                self._callers.at(caller[0], _error(outcome)).observe((at_s - came_s,))
        _count(self._served, spent)
        for (function, _), values in waited.items():
            self._queued.at(function).observe(values)

    def _fold_received(self, events: Events) -> None:
        for at_s, began_s, _, function, _, outcome, items, _ in events:
            stream = self._received.at(function, _error(outcome))
            stream.observe((at_s - began_s,))
            self._received_items.at(function).observe((items,))

    def _fold_sent(self, events: Events) -> None:
        for at_s, came_s, _, function, _, outcome, items in events:
            self._sent.at(function, _error(outcome)).observe((at_s - came_s,))
            self._sent_items.at(function).observe((items,))

    # --- references and training -----------------------------------------------------

    def _fold_references(self, events: Events) -> None:
        for _, _, change in events:
            self._references.at(change).value += 1

    def _fold_passes(self, events: Events) -> None:
        for at_s, began_s, _, _, is_committed, *_ in events:
            outcome = "committed" if is_committed else "dropped"
            self._passes.at(outcome).observe((at_s - began_s,))

    def _fold_steps(self, events: Events) -> None:
        for at_s, began_s, optimizer, _, outcome, _ in events:
            self._steps.at(optimizer, outcome).observe((at_s - began_s,))

    def _fold_collectives(self, events: Events) -> None:
        for at_s, began_s, _, operation, *_, outcome, _, _ in events:
            self._collectives.at(operation, outcome).observe((at_s - began_s,))

    def _fold_buckets(self, events: Events) -> None:
        for at_s, began_s, _, nbytes, _ in events:
            self._buckets.at().observe((at_s - began_s,))
            self._bucket_bytes.at().value += nbytes

    # --- links, members, memory ------------------------------------------------------

    def _fold_links(self, events: Events) -> None:
        for _, _, change, _ in events:
            self._links.at(change).value += 1

    def _fold_members(self, events: Events) -> None:
        for _, _, change in events:
            self._members.at(change).value += 1

    def _fold_memory(self, events: Events) -> None:
        for _, kind, change, _ in events:
            self._memory.at(_SLABS.get(kind, "peers"), change).value += 1

    # --- samples ---------------------------------------------------------------------

    def _fold_loop_lags(self, events: Events) -> None:
        for (lag_s,) in events:
            self._loop_lags.at().observe((lag_s,))

    def _fold_gil_lags(self, events: Events) -> None:
        for (lag_s,) in events:
            self._gil_lags.at().observe((lag_s,))


def _error(outcome: str) -> str:
    """Return an outcome in OpenTelemetry's form: empty if there was no error."""
    return "" if outcome == OK else outcome


def _count(
    series: MetricSeries[Histogram], grouped: Mapping[tuple[str, str], list[float]]
) -> None:
    for (function, outcome), values in grouped.items():
        series.at(function, _error(outcome)).observe(values)


def _snapshot(values: tuple[str, ...], figure: Histogram | Total) -> SeriesSnapshot:
    if isinstance(figure, Histogram):
        return SeriesSnapshot(values, tuple(figure.cumulative()), figure.total)
    return SeriesSnapshot(values, (), figure.value)
