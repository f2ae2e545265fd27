"""Metrics as text: OpenMetrics 1.0, or the older format of Prometheus.

This module takes a tenth of the time of prometheus_client: a scrape competes with the
calls of the worker for the interpreter's lock.  The tests read the text with the
parsers of prometheus_client.

Source: https://prometheus.io/docs/specs/om/open_metrics_spec/ and
https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, TypeAlias

from asyncrpc.tools.observability.definitions import (
    DEFINITIONS,
    MetricDefinition,
    MetricKind,
)
from asyncrpc.tools.observability.figures import SeriesSnapshot

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
