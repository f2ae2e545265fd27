"""A generation has a span, from its arrival until its consumer has the last item."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from asyncrpc.errors import OverloadedError
from asyncrpc.serving import ContinuousBatcher
from asyncrpc.testing import acting_as
from tests.countdown import FAILS_AT, Countdown
from tests.integration.traces.collected import Spans
from tests.integration.traces.conftest import Trio


async def ask(
    counter: ContinuousBatcher[int, list[int], int], number: int
) -> list[int]:
    return [item async for item in counter.generate(number)]


async def test_generation_is_part_of_its_request(trio: Trio, spans: Spans) -> None:
    with acting_as(trio[0]):
        async with ContinuousBatcher(Countdown(), 2, in_thread=False) as counter:
            with spans.tracer().start_as_current_span("request"):
                assert await ask(counter, 3) == [2, 1, 0]
            assert await ask(counter, 1) == [0]
    first, second = spans.named("Countdown")
    assert first.parent_id == spans.single("request").span_id
    assert second.parent_id is None
    assert (first.kind, first.status) == ("INTERNAL", "UNSET")
    waited_s = first.attributes.pop("asyncrpc.generation.waited_s")
    assert 0.0 <= waited_s <= first.attributes.pop("asyncrpc.generation.first_item_s")
    assert first.attributes == {"asyncrpc.worker": "a", "asyncrpc.stream.items": 3}


async def test_failed_generation_has_an_error_span(trio: Trio, spans: Spans) -> None:
    with acting_as(trio[0]):
        async with ContinuousBatcher(Countdown(), 2, in_thread=False) as counter:
            with pytest.raises(ValueError, match="no luck"):
                await ask(counter, FAILS_AT + 3)
    shown = spans.single("Countdown")
    assert (shown.status, shown.error_type) == ("ERROR", "ValueError")
    assert shown.attributes["asyncrpc.stream.items"] == 2


async def test_abandoned_generation_has_an_ended_span(trio: Trio, spans: Spans) -> None:
    with acting_as(trio[0]):
        async with (
            ContinuousBatcher(Countdown(), 2, in_thread=False) as counter,
            aclosing(counter.generate(1000)) as items,
        ):
            assert await anext(items) == 999
    shown = spans.single("Countdown")
    assert shown.status == "UNSET"
    assert shown.attributes["asyncrpc.cancelled"] is True
    assert shown.attributes["asyncrpc.stream.items"] == 1


async def test_refused_generation_has_an_error_span(trio: Trio, spans: Spans) -> None:
    with acting_as(trio[0]):
        limits: Any = {"inside_max": 1, "waiting_max": 1}
        async with (
            ContinuousBatcher(Countdown(), 1, in_thread=False, **limits) as counter,
            aclosing(counter.generate(1000)) as inside,
        ):
            await anext(inside)
            waiting = asyncio.ensure_future(anext(counter.generate(1000)))
            await asyncio.sleep(0)  # it waits
            with pytest.raises(OverloadedError):
                await ask(counter, 1)
            waiting.cancel()
            await asyncio.wait([waiting])
    refused = [span for span in spans.named("Countdown") if span.status == "ERROR"]
    assert "OverloadedError" in {span.error_type for span in refused}
    of_refused = next(span for span in refused if span.error_type == "OverloadedError")
    assert of_refused.attributes["asyncrpc.stream.items"] == 0
    assert "asyncrpc.generation.waited_s" not in of_refused.attributes


async def test_untraced_batcher_has_no_spans(plain: Trio, spans: Spans) -> None:
    with acting_as(plain[0]):
        async with ContinuousBatcher(Countdown(), 1, in_thread=False) as counter:
            assert await ask(counter, 1) == [0]
    assert spans.all == []
