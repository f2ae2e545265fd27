"""Ties the life of a worker to that of an application."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeAlias

from asyncrpc.core.arguments import check_kind, wrong
from asyncrpc.core.worker import Worker

# A worker, started or not, or a function that makes one.
WorkerSource: TypeAlias = Worker | Callable[[], Worker]


def check_worker_source(worker: object) -> None:
    """Raise UsageError unless an argument is a worker, or callable."""
    if not isinstance(worker, Worker) and not callable(worker):
        raise wrong("worker", "a Worker, or a function that makes one", worker)


def worker_of(source: WorkerSource) -> Worker:
    """Return the worker, or the one that the function makes."""
    chosen = source if isinstance(source, Worker) else source()
    check_kind("what worker() returns", chosen, Worker, "a Worker")
    return chosen


@asynccontextmanager
async def running(worker: Worker) -> AsyncIterator[None]:
    """Start a worker, and end it with the block; leave a running one as it is."""
    if not worker.is_closed:
        yield
        return
    async with worker:
        yield
