"""What travels: the decision of the root, and nothing of what cannot be read."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState

from asyncrpc import Worker
from asyncrpc.core.services.extensions import TRACE
from tests.integration.traces import remote
from tests.integration.traces.collected import Spans, context_of
from tests.integration.traces.conftest import Trio

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TRACE_ID, SPAN_ID = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331


async def call_with(a: Worker, position: Any) -> tuple[int, int]:
    """Call with something where the position in a trace should be."""
    call = a.parts.new_call("here_async", "b")
    target, values = a.parts.describe(remote.here_async, (), {})
    a.parts.begin(call, target, values, meta={TRACE: position})
    result: tuple[int, int] = await call
    return result


@pytest.mark.parametrize(
    "position", [PARENT, [PARENT], [PARENT, "k=v", 3], [PARENT, 7]]
)
async def test_peers_position_is_parent(
    plain: Trio, spans: Spans, position: Any
) -> None:
    a, b, _ = plain
    spans.trace(b)
    await call_with(a, position)
    server = spans.single("here_async")
    assert (server.trace_id, server.parent_id) == (TRACE_ID, SPAN_ID)
    assert server.tracestate == ("k=v" if "k=v" in position else "")


@pytest.mark.parametrize(
    "position",
    [
        "",
        "nonsense",
        PARENT.upper(),
        PARENT.replace("00-", "ff-", 1),
        PARENT + "-00",
        "00-" + "0" * 32 + "-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-" + "0" * 16 + "-01",
        "01" + PARENT[2:] + "-" + "x" * 512,
        PARENT.encode(),
        7,
        True,
        [],
        {},
        [7, PARENT],
        {"traceparent": PARENT},
        ["x" * 10_000, "y" * 10_000],
    ],
    ids=repr,
)
async def test_bad_position_is_ignored(
    plain: Trio, spans: Spans, position: Any
) -> None:
    """The call runs, in a trace that begins with it."""
    a, b, _ = plain
    spans.trace(b)
    result = await call_with(a, position)
    server = spans.single("here_async")
    assert (server.parent_id, server.status) == (None, "UNSET")
    assert result == context_of(server)
    assert server.trace_id != TRACE_ID


async def test_a_long_tracestate_is_left_out(plain: Trio, spans: Spans) -> None:
    a, b, _ = plain
    spans.trace(b)
    await call_with(a, [PARENT, "k=" + "v" * 511])
    server = spans.single("here_async")
    assert (server.parent_id, server.tracestate) == (SPAN_ID, "")


async def test_tracestate_travels_to_the_last_worker(a: Worker, spans: Spans) -> None:
    state = TraceState([("vendor", "value"), ("other", "1")])
    parent = SpanContext(
        1, 2, is_remote=True, trace_flags=TraceFlags(1), trace_state=state
    )
    with trace.use_span(NonRecordingSpan(parent)):
        await a.peer("b").call(remote.call_on, "c")
    assert {span.tracestate for span in spans.all} == {"vendor=value,other=1"}
    assert {span.trace_id for span in spans.all} == {1}


async def test_unsampled_root_is_recorded_by_none(plain: Trio, spans: Spans) -> None:
    """The others would record whatever begins with them."""
    a, b, c = plain
    off = Spans(sampled=False)
    off.trace(a)
    spans.trace(b, c)
    first, second = await a.peer("b").call(remote.through, "b", "c")
    assert spans.all == off.all == []
    assert first[0] == second[0] != 0  # in one trace all the same
    assert first[1] != second[1]


async def test_sampled_root_is_recorded_by_all(plain: Trio, spans: Spans) -> None:
    """The others would record nothing that begins with them."""
    a, b, c = plain
    off = Spans(sampled=False)
    off.trace(b, c)
    spans.trace(a)
    await a.peer("b").call(remote.through, "b", "c")
    assert [span.kind for span in spans.all] == ["CLIENT"]
    assert [span.kind for span in off.all] == ["SERVER", "CLIENT", "SERVER"]
