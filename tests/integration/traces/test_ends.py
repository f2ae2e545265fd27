"""How calls end: errors, cancellations, deadlines, lost workers, attempts."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

import asyncrpc
from asyncrpc import LimitOptions, Options, Worker
from asyncrpc.testing import Cluster, ProcessCluster
from tests.integration.traces import remote
from tests.integration.traces.collected import LIMIT_S, Spans


@pytest.fixture
def gate() -> Iterator[asyncio.Event]:
    remote.gates["g"] = event = asyncio.Event()
    yield event
    del remote.gates["g"]


async def test_error_of_a_function_is_in_both_spans(a: Worker, spans: Spans) -> None:
    with pytest.raises(ValueError, match="no luck"):
        await a.peer("b").call(remote.fail)
    for span in spans.pair("fail"):
        assert (span.status, span.error_type) == ("ERROR", "ValueError")
        assert span.text == "no luck"


async def test_constructor_error_is_in_owners_span(a: Worker, spans: Spans) -> None:
    failed = a.peer("b").remote(remote.fail)
    with pytest.raises(ValueError, match="no luck"):
        await failed.to_here()
    client, server = spans.pair("fail")
    assert (client.status, server.status) == ("UNSET", "ERROR")


async def test_cancelled_call_has_errors(
    a: Worker, spans: Spans, gate: asyncio.Event
) -> None:
    call = asyncio.create_task(a.peer("b").call(remote.wait_for, "g"))
    await asyncio.wait_for(gate.wait(), LIMIT_S)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await spans.has(lambda: len(spans.all) == 2)
    for span in spans.pair("wait_for"):
        assert (span.status, span.error_type) == ("ERROR", "CancelledError")


async def test_expired_call_is_error(
    a: Worker, spans: Spans, gate: asyncio.Event
) -> None:
    timeout_s = 0.05
    while not gate.is_set():  # on a busy machine it may pass before the function begins
        with pytest.raises(TimeoutError):
            await a.peer("b").using(timeout_s=timeout_s).call(remote.wait_for, "g")
        timeout_s *= 4
    await spans.has(lambda: any(span.kind == "SERVER" for span in spans.all))
    server = spans.single("wait_for", "SERVER")
    (client,) = [span for span in spans.all if span.span_id == server.parent_id]
    assert (client.status, client.error_type) == ("ERROR", "DeadlineExceededError")
    # Whether its own clock or the caller's word comes first is chance.
    assert server.error_type in {"DeadlineExceededError", "CancelledError"}


async def test_call_of_a_killed_worker_has_an_error_span(spans: Spans) -> None:
    cluster = ProcessCluster(["b"], method="forkserver")
    async with cluster as a:
        spans.trace(a)
        cluster.expect_death("b")
        with pytest.raises(asyncrpc.WorkerLostError):
            await a.peer("b").call(os.kill, cluster.pid("b"), signal.SIGKILL)
    client = spans.single("kill")
    assert (client.status, client.error_type) == ("ERROR", "WorkerLostError")


async def test_attempts_have_spans_of_call(spans: Spans, gate: asyncio.Event) -> None:
    options = Options(limits=LimitOptions(inbound_calls_max=1), drain_timeout_s=2.0)
    async with Cluster(2, network="uds", options=options) as (a, b):
        spans.trace(a, b)
        holding = asyncio.create_task(a.peer("b").call(remote.hold, "g"))
        await asyncio.sleep(0)  # it is sent before the next one
        with spans.tracer().start_as_current_span("outer"):
            reading = asyncio.create_task(a.peer("b").call(remote.read))
        await spans.has(lambda: bool(spans.named("read", "CLIENT")))
        gate.set()
        answer = await reading
        await holding
    whole = spans.single("read", "INTERNAL")
    assert whole.parent_id == spans.single("outer").span_id
    assert whole.status == "UNSET"
    *refused, last = spans.named("read", "CLIENT")
    assert refused
    assert {span.error_type for span in refused} == {"OverloadedError"}
    assert {span.parent_id for span in (*refused, last)} == {whole.span_id}
    server = spans.single("read", "SERVER")
    assert (server.parent_id, answer[1]) == (last.span_id, server.span_id)


async def test_unawaited_error_reaches_the_handler(a: Worker, spans: Spans) -> None:
    """The span reads the error without marking it as retrieved."""
    errors: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: errors.append(context["exception"]))
    call = a.parts.start_call("b", remote.fail)
    await asyncio.wait([call])
    del call
    loop.set_exception_handler(None)
    assert [str(error) for error in errors] == ["no luck"]
