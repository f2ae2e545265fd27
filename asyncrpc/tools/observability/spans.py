"""Spans of OpenTelemetry for calls, streams, batches and requests to an application.

Names and attributes are those of the semantic conventions 1.45 for RPC and HTTP;
`asyncrpc.*` are our own.  Whether a span is recorded is decided where its trace begins:
a span that is not recorded passes the decision on, and costs little more.

A span never makes a call fail: if a sampler, processor or exporter of the program
fails, the error is logged.

The position in a trace that travels with a request, as W3C Trace Context writes it.

It is one text, the header `traceparent`, or a list of two, with `tracestate`.  Incoming
texts are from peers: invalid ones are ignored, as the specification demands, and so are
texts of more than `TEXT_MAX` characters.

Source: https://www.w3.org/TR/trace-context/, sections 3.2 and 3.3.

Source: https://opentelemetry.io/docs/specs/semconv/rpc/rpc-spans/
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import (
    INVALID_SPAN,
    Link,
    Span,
    SpanContext,
    SpanKind,
    StatusCode,
    TracerProvider,
    format_span_id,
    format_trace_id,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from asyncrpc.core.loop.clock import NS_PER_S, wall_ns
from asyncrpc.core.serde import text_of
from asyncrpc.trace import CANCELLED, OK, outcome_of

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


logger = logging.getLogger("asyncrpc")

_SCHEMA: Final = "https://opentelemetry.io/schemas/1.45.0"
_TEXT_MAX: Final = 1024  # characters of an error in a span, whose exporters have limits
_UNKNOWN_METHOD: Final = "_OTHER"  # as the conventions say
_SERVER_ERROR: Final = 500


class CallSpan:
    """The span of a call or a stream at one of its ends, or of items made here.

    Attributes:
        meta: the trace context that is sent with its request, or None.
        span: OpenTelemetry's span.
    """

    __slots__ = ("_has_ended", "_kind", "_text", "meta", "span")

    def __init__(self, span: Span, meta: Any = None) -> None:
        self.span = span
        self.meta = meta
        self._kind = ""  # class of the error that it failed with
        self._text = ""
        self._has_ended = False

    def noted(self, name: str, value: float) -> None:
        """Add an attribute that is known only now."""
        if not self._has_ended:
            self.span.set_attribute(name, value)

    def failed(self, error: BaseException) -> None:
        """Note the error with which the call fails; it is about to end."""
        if not self._has_ended and self.span.is_recording():
            self._kind = _kind_of(error)
            self._text = text_of(error)[:_TEXT_MAX]

    def end(self, outcome: str, *, items: int | None = None) -> None:
        """End the span, unless it has ended.

        A stream that its consumer leaves early has not failed.
        """
        if self._has_ended:
            return
        self._has_ended = True
        _quietly(lambda: self._end(outcome, items))

    def _end(self, outcome: str, items: int | None) -> None:
        span = self.span
        if span.is_recording():
            if items is not None:
                span.set_attribute("asyncrpc.stream.items", items)
            if outcome == CANCELLED:
                span.set_attribute("asyncrpc.cancelled", True)  # noqa: FBT003  (a value)
                is_failure = bool(self._kind) or items is None
            else:
                is_failure = bool(self._kind) or outcome != OK
            if is_failure:
                kind = "CancelledError" if outcome == CANCELLED else outcome
                _fail(span, self._kind or kind, self._text)
        span.end()


class RequestSpan:
    """The span of a request to an application.

    Attributes:
        is_answered: whether there is an answer, which may be an exception.
    """

    __slots__ = ("_method", "_span", "is_answered")

    def __init__(self, span: Span, method: str = "") -> None:
        self._span = span
        self._method = method
        self.is_answered = False

    def routed(self, route: str) -> None:
        """Note the pattern that the path matches, which is known only now."""
        self._span.set_attribute("http.route", route)
        self._span.update_name(f"{self._method} {route}")

    def answered(self, status: int) -> None:
        """Note the HTTP status of the answer."""
        self.is_answered = True
        self._span.set_attribute("http.response.status_code", status)
        if status >= _SERVER_ERROR:
            _fail(self._span, str(status), "")

    def closed(self, code: int, *, has_failed: bool) -> None:
        """Note the code with which the websocket was closed."""
        self._span.set_attribute("asyncrpc.websocket.close_code", code)
        if has_failed:
            _fail(self._span, str(code), "")


class CallTracer:
    """Makes the spans of one worker; a `runtime.extensions.CallTracer`."""

    def __init__(self, name: str, provider: TracerProvider | None) -> None:
        """Prepare to make spans.

        Args:
            provider: makes tracers; None: the global one.
        """
        self._name = name
        self._tracer = trace.get_tracer(
            "asyncrpc", tracer_provider=provider, schema_url=_SCHEMA
        )

    def called(
        self,
        function: str,
        to: str,
        *,
        attempt_of: CallSpan | None = None,
        is_repeated: bool = False,
    ) -> CallSpan:
        """Show a call, or a stream, from now on, at its caller."""
        parent = None
        if attempt_of is not None:
            parent = trace.set_span_in_context(attempt_of.span)
        span = self._start(
            function,
            SpanKind.INTERNAL if is_repeated else SpanKind.CLIENT,
            _about(function, caller=self._name, callee=to),
            parent,
        )
        return CallSpan(span, written(span.get_span_context()))

    def served(
        self, function: str, caller: str, meta: Any, *, waited_s: float
    ) -> CallSpan:
        """Show a call, or a stream, at its callee, and make it the current one.

        Args:
            meta: the trace context that came with the request, unchecked, or None.
        """
        parent = Context() if meta is None else read(meta)
        span = self._start(
            function,
            SpanKind.SERVER,
            _about(function, caller=caller, callee=self._name),
            parent,
            begun_ns=wall_ns() - int(waited_s * NS_PER_S),
        )
        contexts.attach(trace.set_span_in_context(span, parent))
        return CallSpan(span)

    def generation(self, name: str) -> CallSpan:
        """Make a span for items that are generated here, below the current span."""
        about = {"asyncrpc.worker": self._name}
        return CallSpan(self._start(name, SpanKind.INTERNAL, about, None))

    def here(self) -> SpanContext | None:
        """Return the position of the current span; None if there is none."""
        context = trace.get_current_span().get_span_context()
        return context if context.is_valid else None

    @contextmanager
    def batch(
        self, function: str, members: Sequence[SpanContext | None]
    ) -> Iterator[None]:
        """Make a span for a function that works for several requests at once.

        It is the root of a trace, with a link to each request, as it belongs to several
        of them.
        """
        links = [Link(member) for member in members if member is not None]
        about = {"asyncrpc.batch.size": len(members), "asyncrpc.worker": self._name}
        span = self._start(function, SpanKind.INTERNAL, about, Context(), links=links)
        with _current(span):
            yield

    @contextmanager
    def request(
        self, method: str, route: str, path: str, parent: tuple[str, str]
    ) -> Iterator[RequestSpan]:
        """Make a span for a request to a web application, unless it has one already.

        Args:
            route: the pattern that its path matches; empty if it matches none.
        """
        if self.here() is not None:
            yield RequestSpan(INVALID_SPAN)
            return
        about = {"http.request.method": method, "url.path": path}
        if route:
            about["http.route"] = route
        name = f"{method} {route}" if route else method
        span = self._start(name, SpanKind.SERVER, about, read(list(parent)))
        shown = RequestSpan(span, method)
        with _current(span, has_failed=lambda: not shown.is_answered):
            yield shown

    def _start(  # noqa: PLR0917
        self,
        name: str,
        kind: SpanKind,
        attributes: Mapping[str, Any],
        parent: Context | None,
        begun_ns: int | None = None,
        links: Sequence[Link] = (),
    ) -> Span:
        def start() -> Span:
            return self._tracer.start_span(
                name or "asyncrpc",
                parent,
                kind,
                attributes,
                links,
                begun_ns,
            )

        return _quietly(start) or INVALID_SPAN


def _about(function: str, *, caller: str, callee: str) -> dict[str, Any]:
    """Return the attributes of a call."""
    return {
        "rpc.system.name": "asyncrpc",
        "rpc.method": function or _UNKNOWN_METHOD,
        "asyncrpc.caller": caller,
        "asyncrpc.callee": callee,
    }


@contextmanager
def _current(
    span: Span, has_failed: Callable[[], bool] = lambda: True
) -> Iterator[None]:
    """Make a span the current one, and end it with the block."""
    token = contexts.attach(trace.set_span_in_context(span))
    try:
        yield
    except BaseException as error:
        if has_failed():
            _fail(span, _kind_of(error), text_of(error)[:_TEXT_MAX])
        raise
    finally:
        contexts.detach(token)
        _quietly(span.end)


def _fail(span: Span, kind: str, text: str) -> None:
    span.set_attribute("error.type", kind)
    span.set_status(StatusCode.ERROR, text or None)


def _kind_of(error: BaseException) -> str:
    outcome = outcome_of(error)
    return "CancelledError" if outcome == CANCELLED else outcome


def _quietly(action: Callable[[], Any]) -> Any:
    """Run an action with the program's samplers and processors; None if it fails."""
    try:
        return action()
    except Exception:
        logger.exception("a span of OpenTelemetry failed; the call continues without")
        return None
