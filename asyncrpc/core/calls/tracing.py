"""Calls in traces: a span at the caller, and one at the callee.

A `CallTracer` knows what a span is; this module begins and ends spans.  While a worker
has no tracer, a call costs two looks at an attribute at each end.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self

from asyncrpc.core.calls.context import current_call_var
from asyncrpc.core.services.extensions import TRACE, CallSpan, CallTracer
from asyncrpc.core.trace.events import CANCELLED, OK, outcome_of

if TYPE_CHECKING:
    from types import TracebackType

    from asyncrpc.core.calls.futures import CallFuture
    from asyncrpc.core.calls.inbound import InboundCall
    from asyncrpc.core.calls.modes import Target

_UNTRACED: Final = nullcontext()


def trace_call(
    tracer: CallTracer,
    call: CallFuture[Any],
    *,
    attempt_of: CallFuture[Any] | None = None,
    is_repeated: bool = False,
) -> None:
    """Show a call from now to its end."""
    whole = None if attempt_of is None else attempt_of.span
    call.span = span = tracer.called(
        call.function, call.to, attempt_of=whole, is_repeated=is_repeated
    )
    call.add_done_callback(partial(_end_with, span))


def _end_with(span: CallSpan, call: CallFuture[Any]) -> None:
    error = call.failure
    if error is not None:
        span.failed(error)
    span.end(CANCELLED if call.cancelled() else outcome_of(error))


def end_unsent(call: CallFuture[Any], error: BaseException) -> None:
    """End the span, if any, of a call that raises before it is sent."""
    if call.span is not None:
        call.span.failed(error)
        call.span.end(outcome_of(error))


def with_span(
    meta: dict[str, Any] | None, span: CallSpan | None
) -> dict[str, Any] | None:
    """Return what travels with a request, its caller's position in a trace included."""
    if span is None or span.meta is None:
        return meta
    return {**(meta or {}), TRACE: span.meta}


def trace_function(
    tracer: CallTracer, inbound: InboundCall, target: Target, caller: str
) -> None:
    """Show a function that a peer has called from now to its answer."""

    def begin(function: str) -> CallSpan:
        waited_s = inbound.host.recorder.now_s() - inbound.came_s
        trace_context = inbound.meta.get(TRACE)
        return tracer.served(function, caller, trace_context, waited_s=waited_s)

    # In the call's own context, and no copy of it: there the span becomes current.
    context = inbound.context
    if context is None or current_call_var.get() is inbound:
        inbound.span = begin(target.name)
    else:
        inbound.span = context.run(begin, target.name)


def stream_trace(
    tracer: CallTracer | None, function: str, to: str
) -> AbstractContextManager[StreamTrace | None]:
    """Return a context for a stream at its consumer; it gives None without a tracer.

    Args:
        tracer: shows the stream; None: nothing does.
    """
    return _UNTRACED if tracer is None else StreamTrace(tracer.called(function, to))


def generation_trace(
    tracer: CallTracer | None, name: str
) -> AbstractContextManager[StreamTrace | None]:
    """Return a context for items that are made here; it gives None without a tracer.

    Args:
        tracer: shows them; None: nothing does.
    """
    return _UNTRACED if tracer is None else StreamTrace(tracer.generation(name))


class StreamTrace:
    """A stream in a trace, at its consumer: a context around all of it.

    Attributes:
        count: returns how many items have come.
    """

    def __init__(self, span: CallSpan) -> None:
        self.span = span
        self.count: Callable[[], int] = int

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        outcome = OK
        if isinstance(error, GeneratorExit):  # the consumer has left, as it may
            outcome = CANCELLED
        elif error is not None:
            self.span.failed(error)
            outcome = outcome_of(error)
        self.span.end(outcome, items=self.count())
