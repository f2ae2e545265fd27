"""The metrics of a worker for prometheus_client: a custom collector.

prometheus_client is an extra: `pip install 'asyncrpc-torch[metrics]'`.  It is imported
when a program asks for the collector, not before.

Source: https://prometheus.github.io/client_python/collector/custom/
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from asyncrpc.errors import UsageError
from asyncrpc.tools.observability.definitions import (
    DEFINITIONS,
    MetricDefinition,
    MetricKind,
)
from asyncrpc.tools.observability.exposition import BOUNDS, Snapshot, family_name
from asyncrpc.tools.observability.figures import SeriesSnapshot

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric


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
