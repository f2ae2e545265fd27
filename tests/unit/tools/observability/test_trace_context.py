"""The position in a trace is written as W3C says, and read with care."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.trace import (
    INVALID_SPAN_CONTEXT,
    SpanContext,
    TraceFlags,
    TraceState,
    get_current_span,
)

from asyncrpc.tools.observability.trace_context import TEXT_MAX, read, written

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
    later = "01" + TEXT[2:] + "-more"
    assert found_in(later).span_id == span().span_id
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
