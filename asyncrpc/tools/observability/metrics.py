"""The metrics of one worker: counted from the first request on, read as text.

Some are counted, some are readings of a moment: open links, kept memory and the like.
These are taken when the metrics are read, in any thread, and without the event loop,
which may be blocked.  Without a request nothing is counted, and no thread runs.
Counting does not delay the worker: its calls only append to a queue.

prometheus_client gets them by a custom collector.  It is an extra: `pip install
'asyncrpc-torch[metrics]'`.  It is imported when a program asks for the collector, not
before.

How late an event loop and threads get to run is sampled four times a second.  A thread
sleeps.  The time by which it wakes up late is the lag of threads: another
thread held the interpreter's lock, or no core was free.  Then it schedules a callback
on the loop; the time until that runs is the lag of the loop.  The next callback is
scheduled only after this one has run, so a blocked loop holds one callback at most.

As text they are in OpenMetrics 1.0, or in the older format of Prometheus.  This takes a
tenth of the time of prometheus_client: a scrape competes with the calls of the worker
for the interpreter's lock.  The tests read the text with the parsers of
prometheus_client.

Source: https://prometheus.github.io/client_python/collector/custom/,
https://prometheus.io/docs/specs/om/open_metrics_spec/ and
https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

import asyncio
import importlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, TypeAlias, TypeVar

from asyncrpc.core.arguments import check_count, check_flag, check_kind
from asyncrpc.core.lifecycle import WorkerState
from asyncrpc.core.loop.clock import Clock
from asyncrpc.core.parts import Parts
from asyncrpc.core.worker import Worker
from asyncrpc.errors import UsageError
from asyncrpc.tools.observability import definitions
from asyncrpc.tools.observability import definitions as d
from asyncrpc.tools.observability.definitions import (
    DEFINITIONS,
    MetricDefinition,
    MetricKind,
)
from asyncrpc.tools.observability.figures import SeriesSnapshot, WorkerFigures

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

Snapshot: TypeAlias = Mapping[MetricDefinition, Sequence[SeriesSnapshot]]

OPENMETRICS: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"
PLAIN: Final = "text/plain; version=0.0.4; charset=utf-8"

_SUFFIXES: Final = {MetricKind.COUNTER: "_total", MetricKind.INFO: "_info"}
_VERSIONS: Final = {"", "1.0.0"}  # of OpenMetrics; "": any
_ESCAPES: Final = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})
_DIGITS_MAX: Final = 6  # before the point; longer numbers have an exponent


def content_type_for(accept: str) -> str:
    """Return the format for a request with this header `Accept`."""
    for accepted in accept.split(","):
        kind, *parameters = (part.strip().lower() for part in accepted.split(";"))
        versions = [
            parameter.removeprefix("version=")
            for parameter in parameters
            if "version=" in parameter
        ]
        if kind == "application/openmetrics-text" and set(versions or [""]) & _VERSIONS:
            return OPENMETRICS
    return PLAIN


def family_name(metric: MetricDefinition) -> str:
    """Return the name of a metric as OpenMetrics declares it."""
    return metric.name.removesuffix(_SUFFIXES.get(metric.kind, ""))


def _bound(value: float) -> str:
    """Return a bound as OpenMetrics writes numbers: 0.5, 1.0, 1e+06."""
    digits, _, rest = repr(value).partition(".")
    if len(digits) <= _DIGITS_MAX:
        return f"{digits}.{rest}"
    fraction = digits[1:].rstrip("0")
    point = "." if fraction else ""
    return f"{digits[0]}{point}{fraction}e+{len(digits) - 1:02}"


BOUNDS: Final[Mapping[MetricDefinition, Sequence[str]]] = {
    definition: [*map(_bound, definition.bounds), "+Inf"]
    for definition in DEFINITIONS
    if definition.kind is MetricKind.HISTOGRAM
}


def written(snapshot: Snapshot, content_type: str) -> str:
    """Return metrics as text; in OpenMetrics without the line that ends it."""
    lines: list[str] = []
    is_openmetrics = content_type == OPENMETRICS
    for metric in DEFINITIONS:
        if all_series := snapshot.get(metric):
            lines += _head(metric, is_openmetrics=is_openmetrics)
            for series in all_series:
                lines += _lines(metric, series)
    lines.append("")
    return "\n".join(lines)


def _head(metric: MetricDefinition, *, is_openmetrics: bool) -> Iterator[str]:
    name, kind = metric.name, metric.kind.value
    if is_openmetrics:
        name = family_name(metric)
    elif metric.kind is MetricKind.INFO:  # the older format has no such kind
        kind = MetricKind.GAUGE.value
    yield f"# HELP {name} {metric.text}"
    yield f"# TYPE {name} {kind}"
    if is_openmetrics and metric.unit:
        yield f"# UNIT {name} {metric.unit}"


def _lines(metric: MetricDefinition, series: SeriesSnapshot) -> list[str]:
    name = metric.name
    pairs = [
        *metric.constant.items(),
        *zip(metric.labels, series.values, strict=True),
    ]
    labels = ",".join(
        f'{label}="{value.translate(_ESCAPES)}"' for label, value in pairs
    )
    braced = f"{{{labels}}}" if labels else ""
    if metric.kind is not MetricKind.HISTOGRAM:
        return [f"{name}{braced} {series.total!r}"]
    begin = f"{name}_bucket{{{labels}{',' if labels else ''}le="
    return [
        *[
            f'{begin}"{bound}"}} {count}'
            for bound, count in zip(BOUNDS[metric], series.counts, strict=True)
        ],
        f"{name}_count{braced} {series.counts[-1]}",
        f"{name}_sum{braced} {series.total!r}",
    ]


_LIVE: Final = frozenset({WorkerState.RUNNING, WorkerState.DRAINING})
_TRIES: Final = 10

T = TypeVar("T")


class MetricReading(NamedTuple):
    """A figure at one moment.

    Attributes:
        figure: in the unit of the metric.
    """

    metric: MetricDefinition
    values: tuple[str, ...]
    figure: float


def readings_of(parts: Parts) -> Iterator[MetricReading]:
    """Yield the readings of a worker; 0 for parts that it has no longer, or not yet.

    Thread safety: from any thread.
    """
    identity = parts.identity
    number = f"{identity.incarnation:016x}"
    named = (identity.name, str(identity.rank), str(identity.world_size), number)
    yield MetricReading(d.WORKER, named, 1)
    yield MetricReading(d.RUNNING, (), float(parts.lifecycle.is_running))
    yield MetricReading(d.REFUSED, (), parts.admission.refused)
    is_live = parts.lifecycle.state in _LIVE
    for metric, values, read in _OF_LIVE:
        yield MetricReading(metric, values, _steady(read, parts) if is_live else 0)
    yield from _of_queues(parts)
    for name, metric in d.COUNTERS.items():
        yield MetricReading(metric, (), getattr(parts.counters, name))


def _of_queues(parts: Parts) -> Iterator[MetricReading]:
    for queue in tuple(parts.queues):
        figures = _steady(partial(_figures, queue), parts)
        for name, figure in figures.items():
            if name in d.QUEUE_OUTCOMES:
                yield MetricReading(d.QUEUE_ENDED, (queue, name), figure)
            else:
                yield MetricReading(d.QUEUES[name], (queue,), figure)


def _figures(queue: str, parts: Parts) -> Mapping[str, float]:
    read = parts.queues.get(queue)  # it may have ended meanwhile
    return {} if read is None else read()


def _pending(parts: Parts) -> int:
    return sum(len(link.pending) for link in parts.directory.links)


def _references(parts: Parts) -> int:
    return 0 if parts.references is None else parts.references.values_held


def _links_in(parts: Parts, *, broken: bool) -> int:
    links = parts.directory.links
    return sum(link.connection.is_broken is broken for link in links)


_OF_LIVE: Final[
    tuple[tuple[MetricDefinition, tuple[str, ...], Callable[[Parts], float]], ...]
] = (
    (d.CLIENT_IN_FLIGHT, (), _pending),
    (d.SERVER_IN_FLIGHT, (), lambda parts: parts.active),
    (d.REFERENCES, (), _references),
    (d.LINKS, ("open",), lambda parts: _links_in(parts, broken=False)),
    (d.LINKS, ("broken",), lambda parts: _links_in(parts, broken=True)),
    (d.MEMBERS, (), lambda parts: len(parts.membership.known)),
    (d.SHARED_MEMORY, ("own",), lambda parts: parts.memory.own_bytes),
    (d.SHARED_MEMORY, ("peers",), lambda parts: parts.memory.borrowed_bytes),
    (d.RECEIVE_POOL, (), lambda parts: parts.receive_pool.kept_bytes),
    (d.CREDIT_LIMIT, (), lambda parts: parts.inbound_credit.budget.limit_bytes),
    (d.CREDIT_HELD, (), lambda parts: parts.inbound_credit.budget.held_bytes),
    (d.CREDIT_WAITING, (), lambda parts: parts.inbound_credit.budget.waiting),
)


def _steady(read: Callable[[Parts], T], parts: Parts) -> T:
    """Read something that the loop may change; try again if it did, which is rare."""
    for _ in range(_TRIES):
        try:
            return read(parts)
        except RuntimeError:  # a dictionary or deque changed during the iteration
            continue
    return read(parts)


INTERVAL_S: Final = 0.25

_now_s: Final = Clock().now_s


class LagSampler:
    """A thread that takes samples until it is ended."""

    def __init__(
        self,
        name: str,
        loop_of: Callable[[], asyncio.AbstractEventLoop | None],
        on_loop_lag: Callable[[float], None],
        on_gil_lag: Callable[[float], None],
    ) -> None:
        """Describe the sampler; `start` begins.

        Args:
            on_loop_lag: takes the loop's lag in seconds; called on the loop.
            on_gil_lag: takes the thread's lag in seconds; called in the thread.
        """
        self._loop_of = loop_of
        self._on_loop_lag = on_loop_lag
        self._on_gil_lag = on_gil_lag
        self._ended = threading.Event()
        self._asked_s: float | None = None  # when the pending callback was scheduled
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def blocked_s(self) -> float:
        """How long the pending callback of the loop has waited; 0: none is pending.

        Thread safety: from any thread.
        """
        asked_s = self._asked_s
        return 0.0 if asked_s is None or not self._loop_of() else _now_s() - asked_s

    def start(self) -> None:
        """Begin to take samples."""
        self._thread.start()

    def end(self) -> None:
        """Take no more samples; the thread ends at once, and is not waited for."""
        self._ended.set()

    def _run(self) -> None:
        while True:
            due_s = _now_s() + INTERVAL_S
            if self._ended.wait(INTERVAL_S):
                return
            self._on_gil_lag(max(_now_s() - due_s, 0.0))
            self._ask_loop()

    def _ask_loop(self) -> None:
        loop = self._loop_of()
        if loop is None or self._asked_s is not None:
            return
        asked_s = self._asked_s = _now_s()
        try:
            loop.call_soon_threadsafe(self._on_loop, asked_s)
        except RuntimeError:  # the loop has just been closed
            self._asked_s = None

    def _on_loop(self, asked_s: float) -> None:
        self._asked_s = None
        self._on_loop_lag(_now_s() - asked_s)


def library(name: str) -> Any:
    """Return a module of prometheus_client."""
    try:
        return importlib.import_module(f"prometheus_client{name}")
    except ImportError as error:
        raise UsageError(
            "a collector, and metrics of the process, need prometheus_client: "
            "pip install 'asyncrpc-torch[metrics]'"
        ) from error


class WorkerCollector:
    """A `prometheus_client` collector; register it together with yours.

    A registry takes one worker: the metrics of two have the same names.
    """

    def __init__(self, read: Callable[[], Snapshot]) -> None:
        self._read = read
        self._metric: type[Metric] = library(".metrics_core").Metric

    def describe(self) -> Iterable[Metric]:
        """Return all metrics without a figure."""
        return [self._family(definition) for definition in DEFINITIONS]

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics that have figures.

        Thread safety: from any thread.
        """
        snapshot = self._read()
        for definition in DEFINITIONS:
            if all_series := snapshot.get(definition):
                family = self._family(definition)
                for series in all_series:
                    self._add(family, definition, series)
                yield family

    def _family(self, definition: MetricDefinition) -> Metric:
        return self._metric(
            family_name(definition),
            definition.text,
            definition.kind.value,
            definition.unit,
        )

    def _add(
        self, family: Metric, definition: MetricDefinition, series: SeriesSnapshot
    ) -> None:
        names = dict(zip(definition.labels, series.values, strict=True))
        labels = definition.constant | names
        name = definition.name
        if definition.kind is not MetricKind.HISTOGRAM:
            family.add_sample(name, labels, series.total)
            return
        for bound, count in zip(BOUNDS[definition], series.counts, strict=True):
            family.add_sample(f"{name}_bucket", {**labels, "le": bound}, count)
        family.add_sample(f"{name}_count", labels, series.counts[-1])
        family.add_sample(f"{name}_sum", labels, series.total)


PEERS_MAX: Final = 1000  # with more, the metrics would be too large to be useful


def check_options(peers_max: object, with_process: object) -> None:
    """Raise UsageError unless these are valid options of `Metrics`."""
    check_count("peers_max", peers_max, at_most=PEERS_MAX)
    check_flag("with_process", with_process)
    if with_process:
        library("")


class MetricsText(NamedTuple):
    """The metrics in the form that is sent.

    Attributes:
        content_type: for the header of this name.
        body: the text, as UTF-8.
    """

    content_type: str
    body: bytes


class Metrics:
    """The metrics of one worker; they count while their `with` block runs.

    Example:
        >>> with observability.Metrics(worker) as metrics:
        ...     prometheus_client.REGISTRY.register(metrics.collector)
        ...     await train()
    """

    def __init__(
        self, worker: Worker, *, peers_max: int = 0, with_process: bool = False
    ) -> None:
        """Describe metrics; `with` begins to count.

        Args:
            worker: the worker, started or not.
            peers_max: for how many peers, by name, the times of calls are counted
                separately; further peers count as `other`.  0: for none.
            with_process: whether `text` also has the memory, processor time and
                descriptors of the process, as `prometheus_client` names them.

        Raises:
            UsageError: an argument has the wrong type, or prometheus_client is needed
                and not installed.
        """
        check_kind("worker", worker, Worker, "a Worker")
        check_options(peers_max, with_process)
        self._parts = worker.parts
        self._figures = WorkerFigures(peers_max)
        self._sampler = LagSampler(
            f"{worker.name}-metrics",
            self._running_loop,
            lambda lag_s: self._figures.loop_lags.put((lag_s,)),
            lambda lag_s: self._figures.gil_lags.put((lag_s,)),
        )
        self._is_begun = False
        self._collector: WorkerCollector | None = None
        self._process: CollectorRegistry | None = None
        if with_process:
            self._process = library("").CollectorRegistry()
            library("").ProcessCollector(registry=self._process)

    @property
    def collector(self) -> WorkerCollector:
        """A collector of `prometheus_client`, for your own registry.

        A registry takes one worker: the metrics of two have the same names.

        Raises:
            UsageError: prometheus_client is not installed.
        """
        if self._collector is None:
            self._collector = WorkerCollector(self._snapshot)
        return self._collector

    def __enter__(self) -> Self:
        """Begin to count.

        Raises:
            UsageError: the block was entered before.
        """
        if self._is_begun:
            raise UsageError(
                "these metrics already count, or have ended; make new ones"
            )
        self._is_begun = True
        self._figures.listen(self._parts.recorder)
        self._sampler.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop counting; the counts can still be read.  Idempotent.

        Thread safety: from any thread.
        """
        self._is_begun = True
        self._figures.end(self._parts.recorder)
        self._sampler.end()

    def text(self, accept: str = "") -> MetricsText:
        """Return the metrics as text.

        It takes 1 ms for 20 functions or so: on an event loop use a thread.

        Args:
            accept: the header `Accept` of the request.  The text is OpenMetrics 1.0 if
                the header allows it, else Prometheus' older text format.

        Raises:
            UsageError: `accept` is not a string.

        Thread safety: from any thread.
        """
        check_kind("accept", accept, str, "a string")
        content_type = content_type_for(accept)
        text = written(self._snapshot(), content_type)
        if self._process is not None:
            text += self._text_of_process(content_type)
        if content_type == OPENMETRICS:
            text += "# EOF\n"
        return MetricsText(content_type, text.encode())

    def _text_of_process(self, content_type: str) -> str:
        module = ".openmetrics" if content_type == OPENMETRICS else ""
        encoded = library(f"{module}.exposition").generate_latest(self._process)
        text: str = encoded.decode()
        return text.removesuffix("# EOF\n")

    def _running_loop(self) -> asyncio.AbstractEventLoop | None:
        parts = self._parts
        return parts.loop_guard.loop if parts.lifecycle.is_usable else None

    def _snapshot(self) -> Snapshot:
        snapshot: dict[definitions.MetricDefinition, list[SeriesSnapshot]] = {
            **self._figures.snapshot(),
            definitions.LOOP_BLOCKED: [SeriesSnapshot((), (), self._sampler.blocked_s)],
        }
        for metric, values, figure in readings_of(self._parts):
            snapshot.setdefault(metric, []).append(SeriesSnapshot(values, (), figure))
        return snapshot

    def __repr__(self) -> str:
        return f"<Metrics of {self._parts.identity.name!r}>"
