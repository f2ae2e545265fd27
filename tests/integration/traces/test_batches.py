"""A batch has a span of its own, with links to the requests that it works for."""

from __future__ import annotations

import asyncio

import pytest

from asyncrpc import Worker, current_worker
from asyncrpc.serving import Batcher
from asyncrpc.testing import acting_as
from tests.integration.traces import remote
from tests.integration.traces.collected import Spans
from tests.integration.traces.conftest import Trio


async def doubled(numbers: list[int]) -> list[int]:
    result: list[int] = await current_worker().peer("b").call(remote.double, numbers)
    return result


async def refused(numbers: list[int]) -> list[int]:
    raise ValueError("no luck")


async def ask(batched: Batcher[int, int], spans: Spans, number: int) -> int:
    with spans.tracer().start_as_current_span(f"request {number}"):
        return await batched(number)


async def test_batch_is_linked_to_its_requests(a: Worker, spans: Spans) -> None:
    with acting_as(a):
        async with Batcher(doubled, 3, 3600.0) as batched:
            asked = [ask(batched, spans, number) for number in (1, 2)]
            answers = await asyncio.gather(
                *asked,
                batched(3),  # in no trace
            )
    assert answers == [2, 4, 6]
    batch = spans.single("doubled")
    requests = [spans.single(f"request {number}") for number in (1, 2)]
    assert batch.links == tuple(request.span_id for request in requests)
    assert (batch.kind, batch.parent_id) == ("INTERNAL", None)
    assert batch.attributes == {"asyncrpc.batch.size": 3, "asyncrpc.worker": "a"}
    client, _ = spans.pair("double")
    assert client.parent_id == batch.span_id
    assert [request.status for request in requests] == ["UNSET", "UNSET"]


async def test_failed_batch_has_an_error_span(a: Worker, spans: Spans) -> None:
    with acting_as(a):
        async with Batcher(refused, 1, 0.0) as batched:
            with pytest.raises(ValueError, match="no luck"):
                await batched(1)
    batch = spans.single("refused")
    assert (batch.status, batch.error_type) == ("ERROR", "ValueError")


async def test_untraced_batcher_has_no_spans(plain: Trio, spans: Spans) -> None:
    a: Worker = plain[0]
    with acting_as(a):
        async with Batcher(doubled, 1, 0.0) as batched:
            assert await batched(1) == 2
    assert spans.all == []
