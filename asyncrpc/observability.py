"""What a running worker shows to monitoring tools: metrics and traces.

    async with observability.serve_metrics(worker, port=9400), worker:
        await train()

Metrics are OpenMetrics text, for Prometheus and compatible tools; traces are
OpenTelemetry's spans.  A worker without metrics or traces counts nothing, and its calls
cost nothing more.  prometheus_client (for its registries) and OpenTelemetry are extras:
`pip install 'asyncrpc-torch[metrics,otel]'`; each is imported when it is first used.
"""

from asyncrpc.tools.observability.metrics import Metrics, MetricsText
from asyncrpc.tools.observability.tracing import trace_calls
from asyncrpc.tools.observability.web import add_metrics, metrics_asgi, serve_metrics

__all__ = [
    "Metrics",
    "MetricsText",
    "add_metrics",
    "metrics_asgi",
    "serve_metrics",
    "trace_calls",
]
