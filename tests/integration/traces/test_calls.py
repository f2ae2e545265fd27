"""A span at the caller and one below it at the callee, for every kind of call."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

import pytest

import asyncrpc
from asyncrpc import Worker
from asyncrpc.errors import EncodeError, UnknownWorkerError
from asyncrpc.testing import acting_as
from tests.integration.traces import remote
from tests.integration.traces.collected import Spans, context_of
from tests.integration.traces.conftest import Trio


@pytest.mark.parametrize(
    "function", [remote.here_async, remote.here_in_thread, remote.here_on_loop]
)
async def test_a_function_runs_in_its_span(
    a: Worker, spans: Spans, function: Callable[[], Any]
) -> None:
    result = await a.peer("b").call(function)
    client, server = spans.pair(function.__name__)
    assert result == context_of(server)
    assert client.parent_id is None
    about = {
        "rpc.system.name": "asyncrpc",
        "rpc.method": function.__name__,
        "asyncrpc.caller": "a",
        "asyncrpc.callee": "b",
    }
    assert client.attributes == server.attributes == about
    assert client.status == server.status == "UNSET"


async def test_a_function_that_returns_a_future_has_its_span_to_the_end(
    a: Worker, spans: Spans
) -> None:
    before, after = await a.peer("b").call(remote.here_later)
    _, server = spans.pair("here_later")
    assert before == after == context_of(server)


async def test_the_callers_span_is_the_parent(a: Worker, spans: Spans) -> None:
    with spans.tracer().start_as_current_span("outer"):
        await a.peer("b").call(remote.here_async)
    client, _ = spans.pair("here_async")
    assert client.parent_id == spans.single("outer").span_id


@pytest.mark.parametrize("through", [remote.call_on, remote.call_on_in_thread])
async def test_a_call_of_a_function_is_below_the_function(
    a: Worker, spans: Spans, through: Callable[..., Any]
) -> None:
    """On the loop, and in a thread of the pool."""
    result = await a.peer("b").call(through, "c")
    _, outer = spans.pair(through.__name__)
    client, server = spans.pair("here_async")
    assert client.parent_id == outer.span_id
    assert result == context_of(server)


async def test_call_of_programs_thread_is_in_its_span(a: Worker, spans: Spans) -> None:

    def call() -> Any:
        with spans.tracer().start_as_current_span("outer"):
            return asyncrpc.rpc_sync("b", remote.here_async)

    with acting_as(a):
        await asyncio.to_thread(call)
    client, _ = spans.pair("here_async")
    assert client.parent_id == spans.single("outer").span_id


async def test_call_on_the_loop_has_spans(a: Worker, spans: Spans) -> None:
    assert await a.peer("b").call(max, 1, 2) == 2
    spans.pair("max")


async def test_remote_values_and_methods_have_spans(a: Worker, spans: Spans) -> None:
    with acting_as(a), spans.tracer().start_as_current_span("outer") as outer:
        table = a.peer("b").remote(remote.Table)
        where = await table.rpc_async().where()
        kept = await table.remote().where().to_here()
        maker = (await table.to_here()).origin
    _, server = spans.pair("Table")
    assert maker == context_of(server)
    servers = [context_of(span) for span in spans.all if span.kind == "SERVER"]
    assert {where, kept} < set(servers)
    outer_id = outer.get_span_context().span_id
    clients = [span for span in spans.all if span.kind == "CLIENT"]
    assert [client.parent_id for client in clients] == [outer_id] * 5
    assert {span.parent_id for span in spans.all if span.kind == "SERVER"} == {
        client.span_id for client in clients
    }


async def test_a_group_call_has_a_span_for_each_peer(a: Worker, spans: Spans) -> None:
    with spans.tracer().start_as_current_span("outer") as outer:
        result = await a.group(["b", "c"]).call(remote.here_async)
    clients = spans.named("here_async", "CLIENT")
    servers = spans.named("here_async", "SERVER")
    assert {client.attributes["asyncrpc.callee"] for client in clients} == {"b", "c"}
    assert {client.parent_id for client in clients} == {
        outer.get_span_context().span_id
    }
    assert {server.parent_id for server in servers} == {
        client.span_id for client in clients
    }
    assert set(result) == {context_of(server) for server in servers}


async def test_trace_is_not_among_the_arguments(a: Worker, spans: Spans) -> None:
    arguments = await a.peer("b").call(remote.anything, 1, traceparent=2, t=3)
    assert arguments == ((1,), {"traceparent": 2, "t": 3})
    assert await a.peer("b").call(remote.anything) == ((), {})
    partial = functools.partial(remote.anything, 1)
    assert await a.peer("b").call(partial, 2) == ((1, 2), {})


async def test_call_to_the_own_worker_has_spans(a: Worker, spans: Spans) -> None:
    position = await a.peer("a").call(remote.here_async)
    _, server = spans.pair("here_async")
    assert position == context_of(server)


async def test_codecs_and_options_keep_the_trace(a: Worker, spans: Spans) -> None:
    result = await a.peer("b").using(codec="zstd").call(remote.here_async)
    _, server = spans.pair("here_async")
    assert result == context_of(server)


async def test_untraced_worker_ignores_traces(plain: Trio, spans: Spans) -> None:
    a, *_ = plain
    spans.trace(a)
    assert await a.peer("b").call(remote.here_async) == (0, 0)
    assert [span.kind for span in spans.all] == ["CLIENT"]


async def test_untraced_caller_begins_a_trace_at_the_callee(
    plain: Trio, spans: Spans
) -> None:
    a, b, _ = plain
    spans.trace(b)
    position = await a.peer("b").call(remote.here_async)
    server = spans.single("here_async")
    assert (server.kind, server.parent_id) == ("SERVER", None)
    assert position == context_of(server)


async def test_traces_can_begin_before_the_worker_does(spans: Spans) -> None:
    worker = Worker("alone", rank=0, rendezvous=asyncrpc.LocalRendezvous(1))
    spans.trace(worker)
    async with worker:
        await worker.peer("alone").call(remote.here_async)
    spans.pair("here_async")


@pytest.mark.parametrize("function", [remote.here_async, remote.here_in_thread])
async def test_trace_ends_with_its_call(
    plain: Trio, spans: Spans, function: Callable[[], Any]
) -> None:
    """On the same thread, also if it is the only one."""
    a, b, c = plain
    spans.trace(a, b)
    await a.peer("b").call(function)
    position = await c.peer("b").call(function)  # brings no position
    first, second = spans.named(function.__name__, "SERVER")
    assert second.parent_id is None
    assert second.trace_id != first.trace_id
    assert position == context_of(second)
    assert remote.position() == (0, 0)


class Unsendable:
    def __reduce__(self) -> Any:
        raise TypeError("it stays")


async def test_unsendable_call_has_an_ended_span(a: Worker, spans: Spans) -> None:
    await a.peer("b").call(int)
    spans.clear()
    with pytest.raises(EncodeError):
        await a.peer("b").call(remote.anything, Unsendable())
    with pytest.raises(EncodeError):
        await a.group(["b"]).call(remote.anything, Unsendable())
    failed = spans.named("anything")
    assert [span.error_type for span in failed] == ["EncodeError"] * 2
    assert [span.status for span in failed] == ["ERROR"] * 2


async def test_call_to_unknown_worker_ends_its_span(a: Worker, spans: Spans) -> None:
    with acting_as(a), pytest.raises(UnknownWorkerError):
        await asyncrpc.rpc_async("nobody", remote.anything)
    assert spans.single("anything").error_type == "UnknownWorkerError"
