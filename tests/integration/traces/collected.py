"""The spans that workers have ended, kept in memory, and how they belong together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased

from asyncrpc.core.worker import Worker
from asyncrpc.observability import trace_calls

LIMIT_S = 60.0  # what takes so long hangs


@dataclass(frozen=True)
class Shown:
    """One span, as it can travel.

    Attributes:
        links: the spans that it is linked to, by their ids.
    """

    name: str
    kind: str
    trace_id: int
    span_id: int
    parent_id: int | None
    status: str
    text: str
    attributes: dict[str, Any] = field(hash=False)
    links: tuple[int, ...]
    sampled: bool
    tracestate: str

    @property
    def error_type(self) -> str | None:
        kind: str | None = self.attributes.get("error.type")
        return kind


def shown(span: ReadableSpan) -> Shown:
    context = span.get_span_context()
    assert context is not None
    return Shown(
        span.name,
        span.kind.name,
        context.trace_id,
        context.span_id,
        None if span.parent is None else span.parent.span_id,
        span.status.status_code.name,
        span.status.description or "",
        dict(span.attributes or {}),
        tuple(link.context.span_id for link in span.links),
        context.trace_flags.sampled,
        context.trace_state.to_header(),
    )


class Spans(InMemorySpanExporter):
    """What has ended, and a way to wait for more."""

    def __init__(self, *, sampled: bool = True) -> None:
        super().__init__()
        root = ALWAYS_ON if sampled else ALWAYS_OFF
        self.provider = TracerProvider(
            sampler=ParentBased(root), shutdown_on_exit=False
        )
        self.provider.add_span_processor(SimpleSpanProcessor(self))
        self._news: list[Callable[[], object]] = []

    def export(self, spans: Sequence[ReadableSpan]) -> Any:
        result = super().export(spans)
        for tell in self._news:
            tell()
        return result

    @property
    def all(self) -> list[Shown]:
        return [shown(span) for span in self.get_finished_spans()]

    def named(self, name: str, kind: str = "") -> list[Shown]:
        return [
            span for span in self.all if span.name == name and kind in {"", span.kind}
        ]

    def single(self, name: str, kind: str = "") -> Shown:
        spans = self.named(name, kind)
        assert len(spans) == 1, [(each.name, each.kind) for each in self.all]
        return spans[0]

    def pair(self, name: str) -> tuple[Shown, Shown]:
        """Return the spans of a call at its caller and its callee, which belong."""
        client, server = self.single(name, "CLIENT"), self.single(name, "SERVER")
        assert (server.parent_id, server.trace_id) == (client.span_id, client.trace_id)
        return client, server

    async def has(self, is_enough: Callable[[], bool]) -> None:
        """Wait until enough spans have ended."""
        loop, news = asyncio.get_running_loop(), asyncio.Event()
        tell = lambda: loop.call_soon_threadsafe(news.set)  # noqa: E731
        self._news.append(tell)
        try:
            async with asyncio.timeout(LIMIT_S):
                while not is_enough():
                    news.clear()
                    await news.wait()
        finally:
            self._news.remove(tell)

    def trace(self, *workers: Worker) -> None:
        for worker in workers:
            trace_calls(worker, self.provider)

    def tracer(self) -> Any:
        """Return what the program itself makes spans with."""
        return self.provider.get_tracer("program")


def context_of(span: Shown) -> tuple[int, int]:
    return span.trace_id, span.span_id
