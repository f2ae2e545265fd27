"""How calls end: errors, cancellations, deadlines, lost workers, attempts."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

import asyncrpc
from asyncrpc import LimitOptions, Options
from asyncrpc.testing import Cluster, ProcessCluster
from tests.integration.traces import remote
from tests.integration.traces.collected import LIMIT_S, Spans
from tests.integration.traces.conftest import Trio


@pytest.fixture
def gate() -> Iterator[asyncio.Event]:
    remote.gates["g"] = made = asyncio.Event()
    yield made
    del remote.gates["g"]


async def test_what_a_function_raises_is_at_both_ends(trio: Trio, spans: Spans) -> None:
    a, *_ = trio
    with pytest.raises(ValueError, match="no luck"):
        await a.peer("b").call(remote.fail)
    for one in spans.pair("fail"):
        assert (one.status, one.error_type) == ("ERROR", "ValueError")
        assert one.text == "no luck"


async def test_what_the_maker_of_a_value_raises_is_at_the_owner(
    trio: Trio, spans: Spans
) -> None:
    a, *_ = trio
    failed = a.peer("b").remote(remote.fail)
    with pytest.raises(ValueError, match="no luck"):
        await failed.to_here()
    client, server = spans.pair("fail")
    assert (client.status, server.status) == ("UNSET", "ERROR")


async def test_a_call_that_is_cancelled(
    trio: Trio, spans: Spans, gate: asyncio.Event
) -> None:
    a, *_ = trio
    call = asyncio.create_task(a.peer("b").call(remote.wait_for, "g"))
    async with asyncio.timeout(LIMIT_S):
        await gate.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await spans.has(lambda: len(spans.all) == 2)
    for one in spans.pair("wait_for"):
        assert (one.status, one.error_type) == ("ERROR", "CancelledError")


async def test_a_call_whose_deadline_passes(
    trio: Trio, spans: Spans, gate: asyncio.Event
) -> None:
    a, *_ = trio
    timeout_s = 0.05
    while not gate.is_set():  # on a busy machine it may pass before the function begins
        with pytest.raises(TimeoutError):
            await a.peer("b").using(timeout_s=timeout_s).call(remote.wait_for, "g")
        timeout_s *= 4
    await spans.has(lambda: any(one.kind == "SERVER" for one in spans.all))
    server = spans.one("wait_for", "SERVER")
    (client,) = [one for one in spans.all if one.span_id == server.parent_id]
    assert (client.status, client.error_type) == ("ERROR", "DeadlineExceededError")
    # Whether its own clock or the caller's word comes first is chance.
    assert server.error_type in {"DeadlineExceededError", "CancelledError"}


async def test_a_call_whose_worker_dies(spans: Spans) -> None:
    cluster = ProcessCluster(["b"], method="forkserver")
    async with cluster as a:
        spans.trace(a)
        cluster.expect_death("b")
        with pytest.raises(asyncrpc.WorkerLostError):
            await a.peer("b").call(os.kill, cluster.pid("b"), signal.SIGKILL)
    client = spans.one("kill")
    assert (client.status, client.error_type) == ("ERROR", "WorkerLostError")


async def test_each_attempt_has_a_span_below_that_of_the_call(
    spans: Spans, gate: asyncio.Event
) -> None:
    options = Options(limits=LimitOptions(inbound_calls_max=1), drain_timeout_s=2.0)
    async with Cluster(2, network="uds", options=options) as (a, b):
        spans.trace(a, b)
        holding = asyncio.create_task(a.peer("b").call(remote.hold, "g"))
        await asyncio.sleep(0)  # it is sent before the next one
        with spans.tracer().start_as_current_span("outer"):
            reading = asyncio.create_task(a.peer("b").call(remote.read))
        await spans.has(lambda: bool(spans.named("read", "CLIENT")))
        gate.set()
        found = await reading
        await holding
    whole = spans.one("read", "INTERNAL")
    assert whole.parent_id == spans.one("outer").span_id
    assert whole.status == "UNSET"
    *refused, last = spans.named("read", "CLIENT")
    assert refused
    assert {one.error_type for one in refused} == {"OverloadedError"}
    assert {one.parent_id for one in (*refused, last)} == {whole.span_id}
    server = spans.one("read", "SERVER")
    assert (server.parent_id, found[1]) == (last.span_id, server.span_id)


async def test_an_error_that_nobody_awaits_is_still_told(
    trio: Trio, spans: Spans
) -> None:
    """To look at the error for a span does not count as taking note of it."""
    a, *_ = trio
    told: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: told.append(context["exception"]))
    call = a.parts.start_call("b", remote.fail)
    await asyncio.wait([call])
    del call
    loop.set_exception_handler(None)
    assert [str(one) for one in told] == ["no luck"]
