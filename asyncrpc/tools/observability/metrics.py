"""The metrics of one worker: counted from the first request on, read as text.

Without a request nothing is counted, and no thread runs.  Counting does not delay the
worker: its calls only append to a queue.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from asyncrpc.core.arguments import check_count, check_flag, check_kind
from asyncrpc.core.worker import Worker
from asyncrpc.errors import UsageError
from asyncrpc.tools.observability import definitions
from asyncrpc.tools.observability.collector import WorkerCollector, library
from asyncrpc.tools.observability.exposition import (
    OPENMETRICS,
    Snapshot,
    content_type_for,
    written,
)
from asyncrpc.tools.observability.figures import SeriesSnapshot, WorkerFigures
from asyncrpc.tools.observability.lag_sampler import LagSampler
from asyncrpc.tools.observability.readings import readings_of

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

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
