"""Spans never stand in the way of a call; trace positions are written as by W3C."""

from __future__ import annotations

import contextvars
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import Sampler, SamplingResult
from opentelemetry.trace import (
    INVALID_SPAN_CONTEXT,
    NoOpTracerProvider,
    SpanContext,
    TraceFlags,
    TraceState,
    get_current_span,
)

from asyncrpc import LocalRendezvous, UsageError, Worker
from asyncrpc.observability import trace_calls
from asyncrpc.tools.observability.spans import TEXT_MAX, CallTracer, read, written
from asyncrpc.trace import CANCELLED, OK

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class FaultyProcessor(SpanProcessor):
    def on_end(self, span: ReadableSpan) -> None:
        raise OSError("the disk is full")


class FaultySampler(Sampler):
    def should_sample(self, *args: Any, **kwargs: Any) -> SamplingResult:
        raise RuntimeError("a bug of the program's")

    def get_description(self) -> str:
        return "fails"


def provider(**options: Any) -> TracerProvider:
    return TracerProvider(shutdown_on_exit=False, **options)


def collected() -> tuple[CallTracer, InMemorySpanExporter]:
    tracer_provider, exporter = provider(), InMemorySpanExporter()
    tracer_provider.add_span_processor(SimpleSpanProcessor(exporter))
    return CallTracer("a", tracer_provider), exporter


def only(exporter: InMemorySpanExporter) -> ReadableSpan:
    spans: Sequence[ReadableSpan] = exporter.get_finished_spans()
    assert len(spans) == 1
    return spans[0]


def test_failing_span_processor_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    tracer_provider = provider()
    tracer_provider.add_span_processor(FaultyProcessor())
    CallTracer("a", tracer_provider).called("f", "b").end(OK)
    assert "the disk is full" in caplog.text


def test_failing_sampler_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    span = CallTracer("a", provider(sampler=FaultySampler())).called("f", "b")
    span.end(OK)
    assert span.meta is None
    assert "a bug of the program's" in caplog.text


def test_span_ends_once() -> None:
    tracer, exporter = collected()
    span = tracer.called("f", "b")
    span.failed(ValueError("no luck"))
    span.end("ValueError")
    span.failed(KeyError("late"))
    span.end(OK)
    only_span = only(exporter)
    assert only_span.status.description == "no luck"
    assert (only_span.attributes or {})["error.type"] == "ValueError"


def test_long_text_is_cut() -> None:
    tracer, exporter = collected()
    span = tracer.called("f", "b")
    span.failed(ValueError("x" * 100_000))
    span.end("ValueError")
    assert len(only(exporter).status.description or "") == 1024


@pytest.mark.parametrize(
    ("items", "status", "error"),
    [(None, "ERROR", "CancelledError"), (3, "UNSET", None)],
)
def test_cancelled_stream_is_not_an_error_but_a_cancelled_call_is(
    items: int | None, status: str, error: str | None
) -> None:
    """A stream that its consumer leaves has not failed."""
    tracer, exporter = collected()
    tracer.called("f", "b").end(CANCELLED, items=items)
    span = only(exporter)
    assert span.status.status_code.name == status
    assert (span.attributes or {}).get("error.type") == error


def test_trace_context_is_passed_on_without_an_sdk() -> None:
    """The span of the caller is then the parent of what this worker calls."""
    tracer = CallTracer("b", NoOpTracerProvider())

    def serve() -> Any:
        tracer.served("f", "a", PARENT, waited_s=0.0)
        return tracer.called("g", "c").meta

    assert contextvars.copy_context().run(serve) == PARENT
    assert not get_current_span().get_span_context().is_valid


def test_no_span_begins_without_an_sdk() -> None:
    assert CallTracer("a", NoOpTracerProvider()).called("f", "b").meta is None


def test_missing_opentelemetry_is_reported_with_its_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", None)
    worker = Worker("a", rank=0, rendezvous=LocalRendezvous(1))
    with pytest.raises(UsageError, match=r"pip install 'asyncrpc-torch\[otel\]'"):
        trace_calls(worker)


TEXT = "00-0af7651916cd43dd8448eb211c80319c-00f067aa0ba902b7-01"
# `x` is what a character of a value may be; the key and the sign take 2.
FULL = TraceState([("k", "x" * 256), ("l", "y" * (TEXT_MAX - 256 - 5))])


def span(flags: int = 1, state: TraceState | None = None) -> SpanContext:
    return SpanContext(
        0x0AF7651916CD43DD8448EB211C80319C,
        0x00F067AA0BA902B7,
        is_remote=False,
        trace_flags=TraceFlags(flags),
        trace_state=state,
    )


def found_in(meta: Any) -> SpanContext:
    return get_current_span(read(meta)).get_span_context()


def test_trace_context_is_written_as_a_header() -> None:
    assert written(span()) == TEXT
    assert written(span(0)) == TEXT[:-1] + "0"
    assert written(span(state=TraceState([("k", "v")]))) == [TEXT, "k=v"]


def test_invalid_span_is_not_written() -> None:
    assert written(INVALID_SPAN_CONTEXT) is None


def test_overlong_trace_state_is_not_written() -> None:
    assert len(FULL.to_header()) == TEXT_MAX
    assert written(span(state=FULL)) == [TEXT, FULL.to_header()]
    assert written(span(state=FULL.add("m", "v"))) == TEXT


@pytest.mark.parametrize("flags", [0, 1, 3])
def test_trace_context_is_read_as_it_was_written(flags: int) -> None:
    for state in (None, TraceState([("k", "v")]), FULL):
        before = span(flags, state)
        after = found_in(written(before))
        assert (after.trace_id, after.span_id) == (before.trace_id, before.span_id)
        assert (after.trace_flags, after.is_remote) == (flags, True)
        assert after.trace_state == before.trace_state


def test_later_version_of_the_header_may_have_more_fields() -> None:
    assert found_in("01" + TEXT[2:] + "-more").span_id == span().span_id
    assert found_in([TEXT, "k=v", "more"]).trace_state == TraceState([("k", "v")])


@pytest.mark.parametrize(
    "meta",
    [None, "", "x", 7, [], [None], [7, TEXT], {}, (TEXT,), TEXT.encode(), TEXT * 20],
    ids=repr,
)
def test_malformed_trace_context_is_ignored(meta: Any) -> None:
    assert not found_in(meta).is_valid


@pytest.mark.parametrize("state", ["", 7, None, "=", "k=v,k=w", "k=" + "v" * TEXT_MAX])
def test_malformed_trace_state_is_left_out(state: Any) -> None:
    context = found_in([TEXT, state])
    assert context.span_id == span().span_id
    assert not context.trace_state
