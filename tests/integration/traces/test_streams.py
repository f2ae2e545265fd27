"""A stream has a span from request to end at both ends, current in every step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import pytest

from asyncrpc import Worker
from tests.integration.traces import remote
from tests.integration.traces.collected import Spans, context_of
from tests.integration.traces.conftest import Trio

COUNT = 40  # more than a producer may run ahead


def items_of(spans: Spans, name: str) -> list[int]:
    return [span.attributes["asyncrpc.stream.items"] for span in spans.pair(name)]


@pytest.mark.parametrize("function", [remote.positions_async, remote.positions])
async def test_stream_steps_run_in_the_span(
    a: Worker, spans: Spans, function: Callable[..., Any]
) -> None:
    with spans.tracer().start_as_current_span("outer") as outer:
        positions = [position async for position in a.peer("b").stream(function, COUNT)]
        assert remote.position()[1] == outer.get_span_context().span_id
    client, server = spans.pair(function.__name__)
    assert positions == [context_of(server)] * COUNT
    assert client.parent_id == spans.single("outer").span_id
    assert items_of(spans, function.__name__) == [COUNT, COUNT]


@pytest.mark.parametrize("function", [remote.calls_async, remote.calls_in_thread])
async def test_calls_of_stream_steps_are_below_the_stream(
    a: Worker, spans: Spans, function: Callable[..., Any]
) -> None:
    positions = [position async for position in a.peer("b").stream(function, "c", 3)]
    _, server = spans.pair(function.__name__)
    clients = spans.named("here_async", "CLIENT")
    assert [client.parent_id for client in clients] == [server.span_id] * 3
    assert positions == [
        context_of(span) for span in spans.named("here_async", "SERVER")
    ]


async def test_inner_span_of_a_plain_generator_spans_its_steps(
    a: Worker, spans: Spans, caplog: pytest.LogCaptureFixture
) -> None:
    """Its steps run in several threads, one after the other, in one context."""
    steps = [step async for step in a.peer("b").stream(remote.inner_span, COUNT)]
    assert all(is_own for _, is_own in steps)
    await spans.has(lambda: bool(spans.named("inner")))
    _, server = spans.pair("inner_span")
    assert spans.single("inner").parent_id == server.span_id
    assert "detach" not in caplog.text


async def test_failed_stream_has_error_spans(a: Worker, spans: Spans) -> None:
    with pytest.raises(ValueError, match="no luck"):
        async for _ in a.peer("b").stream(remote.fail_after, 2):
            pass
    for span in spans.pair("fail_after"):
        assert (span.status, span.error_type) == ("ERROR", "ValueError")
    assert items_of(spans, "fail_after") == [2, 2]


async def test_abandoned_stream_has_cancelled_spans(a: Worker, spans: Spans) -> None:
    async with aclosing(a.peer("b").stream(remote.one_and_wait)) as items:
        async for _ in items:
            break
    await spans.has(lambda: len(spans.all) == 2)
    for span in spans.pair("one_and_wait"):
        assert (span.status, span.error_type) == ("UNSET", None)
        assert span.attributes["asyncrpc.cancelled"] is True
    assert items_of(spans, "one_and_wait") == [1, 1]


async def test_cancelled_consumer_has_an_error_span(a: Worker, spans: Spans) -> None:
    begun = asyncio.Event()

    async def consume() -> None:
        async for _ in a.peer("b").stream(remote.one_and_wait):
            begun.set()

    consuming = asyncio.create_task(consume())
    await begun.wait()
    consuming.cancel()
    with pytest.raises(asyncio.CancelledError):
        await consuming
    await spans.has(lambda: len(spans.all) == 2)
    client, _ = spans.pair("one_and_wait")
    assert (client.status, client.error_type) == ("ERROR", "CancelledError")


async def test_expired_stream_has_an_error_span(a: Worker, spans: Spans) -> None:
    with pytest.raises(TimeoutError):
        async for _ in a.peer("b").using(timeout_s=0.05).stream(remote.one_and_wait):
            pass
    assert spans.single("one_and_wait", "CLIENT").error_type == "DeadlineExceededError"


async def test_stream_to_unknown_worker_has_error(trio: Trio, spans: Spans) -> None:
    a, b, _ = trio
    await b.shutdown()
    with pytest.raises(Exception):  # noqa: B017, PT011  (lost, or not known any more)
        async for _ in a.peer("b").stream(remote.numbers, 1):
            pass
    client = spans.single("numbers", "CLIENT")
    assert (client.status, client.attributes["asyncrpc.stream.items"]) == ("ERROR", 0)
