"""Requests to an ASGI application in traces, where nothing else shows them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from asyncrpc.runtime.extensions import CallTracer
from asyncrpc.serving.asgi.machine.connection import AsgiConnection
from asyncrpc.serving.asgi.protocol import AsgiScope, header_values


@asynccontextmanager
async def traced(
    tracer: CallTracer, scope: AsgiScope, connection: AsgiConnection
) -> AsyncIterator[None]:
    """Show a request in a span that calls of its handler belong to.

    Args:
        tracer: of the application's worker.
        scope: of the request; its headers of trace contexts name the span's parent.
        connection: knows how the request is answered.

    Cancellation:
        The span ends with it.
    """
    parents = header_values(scope, "traceparent")
    parent = (
        parents[0] if len(parents) == 1 else "",
        ",".join(header_values(scope, "tracestate")),
    )
    with tracer.request(scope["method"], "", scope["path"], parent) as span:
        try:
            yield
        finally:
            # A framework notes the route that it has found in the same scope.
            route = getattr(scope.get("route"), "path", "")
            if isinstance(route, str) and route:
                span.routed(route)
            if connection.status is not None:
                span.answered(connection.status)
