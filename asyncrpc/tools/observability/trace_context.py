"""The position in a trace that travels with a request, as W3C Trace Context writes it.

It is one text, the header `traceparent`, or a list of two, with `tracestate`.  Incoming
texts are from peers: invalid ones are ignored, as the specification demands, and so are
texts of more than `TEXT_MAX` characters.

Source: https://www.w3.org/TR/trace-context/, sections 3.2 and 3.3.
"""

from __future__ import annotations

from typing import Any, Final

from opentelemetry.context import Context
from opentelemetry.trace import SpanContext, format_span_id, format_trace_id
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

# The specification has every program pass on so much of a tracestate; a traceparent of
# the present version has 55 characters.
TEXT_MAX: Final = 512

_W3C: Final = TraceContextTextMapPropagator()


def written(span: SpanContext) -> str | list[str] | None:
    """Return the text of a span that is sent; None if it is not part of a trace."""
    if not span.is_valid:
        return None
    trace_id, span_id = format_trace_id(span.trace_id), format_span_id(span.span_id)
    traceparent = f"00-{trace_id}-{span_id}-{span.trace_flags:02x}"
    tracestate = span.trace_state.to_header() if span.trace_state else ""
    if not tracestate or len(tracestate) > TEXT_MAX:
        return traceparent
    return [traceparent, tracestate]


def read(header: Any) -> Context:
    """Return a context with the span that a peer, or a client, has written.

    Args:
        header: as `written` returns it, unchecked; later fields are ignored.
    """
    texts = [header] if type(header) is str else header
    if type(texts) is not list or not texts or not is_text(texts[0]):
        return Context()
    carrier = {"traceparent": texts[0]}
    if len(texts) > 1 and is_text(texts[1]):
        carrier["tracestate"] = texts[1]
    return _W3C.extract(carrier, Context())


def is_text(value: object) -> bool:
    """Return whether an object can be the text of a header."""
    return type(value) is str and 0 < len(value) <= TEXT_MAX
