"""One process of `bench_traces`: calls that are traced, or not."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Final

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    SpanExporter,
    SpanExportResult,
)
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased

import asyncrpc
from asyncrpc.observability import trace_calls
from tests.bench import workloads as w
from tests.bench.harness import Budget, measure_async, p50_p99_us, per_second
from tests.bench.processes import report
from tests.bench.sides import pair
from tests.bench.sides.asyncrpc_side import outstanding
from tests.bench.sides.load import used_by
from tests.bench.sides.side import parser_of_process

ITEMS: Final = 1000
CALLS_EACH: Final = 20
RUNS: Final = 7


class DroppingExporter(SpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return SpanExportResult.SUCCESS


async def numbers(count: int) -> AsyncIterator[int]:
    for number in range(count):
        yield number


def turn_on(worker: asyncrpc.Worker, way: str) -> None:
    if way == "off":
        return
    root = ALWAYS_ON if way == "recorded" else ALWAYS_OFF
    provider = TracerProvider(sampler=ParentBased(root))
    provider.add_span_processor(BatchSpanProcessor(DroppingExporter()))
    trace_calls(worker, provider)


async def processor_times_us(peer: asyncrpc.Peer) -> list[float]:
    """Return what a call takes the caller and the callee: the least of several runs.

    It says more than a rate where others want the cores.
    """

    async def calls() -> None:
        for _ in range(CALLS_EACH):
            await peer.call(w.nothing_async)

    times_s = []
    for _ in range(RUNS):
        work = asyncio.gather(*(calls() for _ in range(w.OUTSTANDING)))
        times_s.append(await used_by(peer, work))
    count = CALLS_EACH * w.OUTSTANDING
    return [min(column) / count * 1e6 for column in zip(*times_s, strict=True)]


async def lead(peer: asyncrpc.Peer, options: argparse.Namespace) -> None:
    seconds = options.seconds

    async def consume() -> None:
        async for _ in peer.stream(numbers, ITEMS):
            pass

    for name, function in (("async def", w.nothing_async), ("def", w.nothing)):
        await measure_async(partial(peer.call, function), Budget(seconds / 4))
        times_s = await measure_async(partial(peer.call, function), Budget(seconds))
        report(f"{name}, us", *p50_p99_us(times_s))
        report(f"{name}, in turn, 1/s", per_second(times_s))
    many = outstanding(w.nothing_async)
    report(f"{w.OUTSTANDING} outstanding, 1/s", *await many(Budget(seconds)))
    report("processor time of a call, us", *await processor_times_us(peer))
    times_s = await measure_async(consume, Budget(seconds))
    report("items of a stream, 1/s", per_second(times_s) * ITEMS)


if __name__ == "__main__":
    parser = parser_of_process()
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--way", required=True)
    options = parser.parse_args()
    pair.run(options, lead, prepare=lambda worker: turn_on(worker, options.way))
