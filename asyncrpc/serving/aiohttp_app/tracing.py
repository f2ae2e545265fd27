"""Spans of requests to an application, where no other middleware makes them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from aiohttp import web

from asyncrpc.extend import CallTracer
from asyncrpc.serving.machine.error_answers import FAILED_CLOSURES

R = TypeVar("R", bound=web.StreamResponse)


async def traced(
    tracer: CallTracer, request: web.Request, answer: Callable[[], Awaitable[R]]
) -> R:
    """Answer a request in a span, to which its handler's calls belong.

    Args:
        request: begins the span; its trace context headers name the parent.
    """
    resource = request.match_info.route.resource
    route = "" if resource is None else resource.canonical
    parent = (_only(request, "traceparent"), _all(request, "tracestate"))
    with tracer.request(request.method, route, request.path, parent) as span:
        try:
            response = await answer()
        except web.HTTPException as answered:
            span.answered(answered.status)
            raise
        span.answered(response.status)
        if isinstance(response, web.WebSocketResponse):
            own = getattr(response, "own_close_code", None)
            code = response.close_code if own is None else own
            if code is not None:
                span.closed(code, has_failed=code in FAILED_CLOSURES)
        return response


def _only(request: web.Request, name: str) -> str:
    """Return a header that may occur only once; empty if it occurs more often."""
    values = request.headers.getall(name, [])
    return values[0] if len(values) == 1 else ""


def _all(request: web.Request, name: str) -> str:
    """Return a header that may occur several times, joined."""
    return ",".join(request.headers.getall(name, []))
