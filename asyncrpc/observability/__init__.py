"""Metrics of a worker in OpenMetrics text, for Prometheus and what reads its format.

    async with observability.serve_metrics(worker, port=9400), worker:
        await train()

A worker whose metrics nobody asks for counts nothing, and its calls cost nothing more.
For registries of prometheus_client there is an extra, `asyncrpc-torch[metrics]`.
"""

from asyncrpc.observability.metrics import Metrics, MetricsText
from asyncrpc.observability.web import add_metrics, metrics_asgi, serve_metrics

__all__ = [
    "Metrics",
    "MetricsText",
    "add_metrics",
    "metrics_asgi",
    "serve_metrics",
]
