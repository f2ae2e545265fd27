"""The queues of requests are among the metrics of the worker before which they are."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

from prometheus_client.openmetrics import parser

from asyncrpc import observability
from asyncrpc.serving import Batcher, ContinuousBatcher, Limiter
from asyncrpc.testing import Cluster, acting_as
from tests.integration.serving.test_continuous import Counter

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def read(metrics: observability.Metrics) -> dict[tuple[str, ...], float]:
    parse: Any = parser.text_string_to_metric_families
    text = metrics.text(OPENMETRICS).body.decode()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in parse(text)
        for sample in family.samples
        if "queue" in sample.labels
    }


async def test_queue_metrics_are_shown_while_the_queue_is_open() -> None:
    hold = asyncio.Event()

    async def predict(items: list[int]) -> list[int]:
        await hold.wait()
        return items

    limiter = Limiter(1, name="handlers")
    async with Cluster(1) as (worker,):
        with acting_as(worker), observability.Metrics(worker) as metrics:
            first = Batcher(predict, 1, 0.0, name="predict")
            second = Batcher(predict, 1, 0.0, name="predict")
            model = ContinuousBatcher[Any, Any, str](Counter(), 1, name="model")
            async with first, second, model, limiter.turn():
                asked = [asyncio.ensure_future(first(number)) for number in range(3)]
                async with aclosing(model.generate(("a", 2))) as items:
                    assert [item async for item in items] == ["a1", "a2"]
                values = read(metrics)
                assert values["asyncrpc_queue_waiting", "predict"] == 2
                assert values["asyncrpc_queue_running", "predict"] == 1
                assert values["asyncrpc_queue_oldest_seconds", "predict"] >= 0
                assert values["asyncrpc_queue_waiting", "predict-2"] == 0
                assert values["asyncrpc_queue_running", "handlers"] == 1
                assert values["asyncrpc_sequence_items_total", "model"] == 2
                assert values["asyncrpc_sequence_steps_total", "model"] == 2
                hold.set()
                await asyncio.gather(*asked)
                values = read(metrics)
                ended = "asyncrpc_queue_requests_total"
                assert values[ended, "predict", "answered"] == 3
                assert values[ended, "model", "answered"] == 1
            assert {queue for _, queue, *_ in read(metrics)} == {"handlers"}
