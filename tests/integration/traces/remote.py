"""What the tests of traces call on other workers: importable in any process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

from opentelemetry import trace

import asyncrpc
from tests.integration.traces.collected import Shown, Spans

Position = tuple[int, int]

kept: list[Spans] = []  # of this process, if it is one of a group
gates: dict[str, asyncio.Event] = {}


def begin(*, sampled: bool = True) -> None:
    """Trace the worker of this process."""
    kept.append(Spans(sampled=sampled))
    kept[-1].trace(asyncrpc.current_worker())


def ended() -> list[Shown]:
    """Return the spans of this process that have ended, but for those of this."""
    return [span for span in kept[-1].all if span.name not in {"ended", "begin"}]


def position() -> Position:
    """Return the trace and the span that are current."""
    context = trace.get_current_span().get_span_context()
    return context.trace_id, context.span_id


async def here_async() -> Position:
    await asyncio.sleep(0)
    return position()


def here_in_thread() -> Position:
    return position()


@asyncrpc.on_loop
def here_on_loop() -> Position:
    return position()


@asyncrpc.async_execution
def here_later() -> Any:
    before = position()

    async def later() -> tuple[Position, Position]:
        await asyncio.sleep(0)
        return before, position()

    return later()


async def through(*names: str) -> list[Position]:
    """Call on from worker to worker; return where each was."""
    rest = names[1:]
    further: list[Position] = []
    if rest:
        further = await asyncrpc.rpc_async(rest[0], through, rest)
    return [position(), *further]


async def call_on(to: str) -> Position:
    result: Position = await asyncrpc.rpc_async(to, here_async)
    return result


def call_on_in_thread(to: str) -> Position:
    result: Position = asyncrpc.rpc_sync(to, here_async)
    return result


def anything(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, kwargs


async def fail() -> None:
    raise ValueError("no luck")


async def wait_for(name: str) -> None:
    gates[name].set()
    await asyncio.Event().wait()


async def hold(name: str) -> None:
    await gates[name].wait()


@asyncrpc.idempotent
async def read() -> Position:
    return position()


class Table:
    def __init__(self) -> None:
        self.origin = position()

    def where(self) -> Position:
        return position()


async def double(numbers: list[int]) -> list[int]:
    return [2 * number for number in numbers]


async def positions_async(count: int) -> AsyncIterator[Position]:
    for _ in range(count):
        yield position()
        await asyncio.sleep(0)


def positions(count: int) -> Iterator[Position]:
    for _ in range(count):
        yield position()


async def calls_async(to: str, count: int) -> AsyncIterator[Position]:
    for _ in range(count):
        yield await asyncrpc.rpc_async(to, here_async)


def calls_in_thread(to: str, count: int) -> Iterator[Position]:
    for _ in range(count):
        yield asyncrpc.rpc_sync(to, here_async)


def inner_span(count: int) -> Iterator[tuple[Position, bool]]:
    """Keep a span of its own open over all steps."""
    tracer = trace.get_tracer("function", tracer_provider=kept[-1].provider)
    with tracer.start_as_current_span("inner") as span:
        own = span.get_span_context()
        for _ in range(count):
            yield position(), position() == (own.trace_id, own.span_id)


async def numbers(count: int) -> AsyncIterator[int]:
    for number in range(count):
        yield number


async def fail_after(count: int) -> AsyncIterator[int]:
    for number in range(count):
        yield number
    raise ValueError("no luck")


async def one_and_wait() -> AsyncIterator[int]:
    yield 1
    await asyncio.Event().wait()
