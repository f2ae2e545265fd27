"""What a running worker shows to the tools around it: traces.

OpenTelemetry is an extra: `pip install 'asyncrpc-torch[otel]'`.  It is imported when it
is first used, not before.
"""

from asyncrpc.observability.tracing import trace_calls

__all__ = ["trace_calls"]
