"""Turns on traces of the calls of a worker; `spans` makes the spans."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrpc.core.arguments import check_kind, wrong
from asyncrpc.core.worker import Worker
from asyncrpc.errors import UsageError
from asyncrpc.extend import trace_by

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider


def trace_calls(worker: Worker, tracer_provider: TracerProvider | None = None) -> None:
    """Show the calls of a worker in OpenTelemetry's traces, from now on.

    A call has a CLIENT span at its caller and a SERVER span at its callee, if both
    workers are traced; so has a stream, with its number of items.  What a function
    calls while it runs is below its span, on whatever thread and worker.  The position
    in the trace travels beside the arguments, never among them.

    Turn it on for each worker of a group, in its own process.  An untraced worker
    ignores incoming trace contexts, and calls made by its functions begin new traces.

    Args:
        worker: makes and serves the calls; it may not have been started yet.
        tracer_provider: makes the spans; None: the global one of OpenTelemetry, even if
            it is set later.

    Raises:
        UsageError: an argument has the wrong type, or OpenTelemetry is not installed.

    Thread safety: from any thread.

    Example:
        >>> async with asyncrpc.Worker("trainer0", rank=0, world_size=3) as worker:
        ...     observability.trace_calls(worker)

    Source: OpenTelemetry's semantic conventions 1.45 for RPC; W3C Trace Context.
    """
    check_kind("worker", worker, Worker, "a Worker")
    try:
        from opentelemetry.trace import TracerProvider  # noqa: PLC0415  (an extra)
    except ImportError as error:
        raise UsageError(
            "traces need OpenTelemetry: pip install 'asyncrpc-torch[otel]'"
        ) from error
    from asyncrpc.tools.observability.spans import CallTracer  # noqa: PLC0415  (needs it)

    if tracer_provider is not None and not isinstance(tracer_provider, TracerProvider):
        wanted = "a TracerProvider of OpenTelemetry, or None"
        raise wrong("tracer_provider", wanted, tracer_provider)
    trace_by(worker, CallTracer(worker.name, tracer_provider))
