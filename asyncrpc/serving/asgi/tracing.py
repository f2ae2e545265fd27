"""Spans of requests and websockets, where no other middleware makes them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from asyncrpc.extend import CallTracer
from asyncrpc.serving.asgi.machine.connection import AsgiConnection
from asyncrpc.serving.asgi.protocol import AsgiScope, header_values
from asyncrpc.serving.machine.error_answers import FAILED_CLOSURES


@asynccontextmanager
async def traced(
    tracer: CallTracer, scope: AsgiScope, connection: AsgiConnection
) -> AsyncIterator[None]:
    """Make a span of a request or websocket, to which its handler's calls belong.

    Args:
        scope: of the request; its trace context headers name the span's parent.
    """
    parents = header_values(scope, "traceparent")
    parent = (
        parents[0] if len(parents) == 1 else "",
        ",".join(header_values(scope, "tracestate")),
    )
    # ASGI gives no method for a websocket: in HTTP/1.1 it is GET (RFC 6455), in HTTP/2
    # CONNECT (RFC 8441).
    opening = "CONNECT" if scope.get("http_version", "") == "2" else "GET"
    method = scope.get("method", opening)
    with tracer.request(method, "", scope["path"], parent) as span:
        try:
            yield
        finally:
            # A framework stores the route that it has found in the same scope.
            route = getattr(scope.get("route"), "path", "")
            if isinstance(route, str) and route:
                span.routed(route)
            if connection.status is not None:
                span.answered(connection.status)
            if connection.close_code is not None:
                code = connection.close_code
                span.closed(code, has_failed=code in FAILED_CLOSURES)
