"""How long a worker lives that an application was given: as long as the application."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeAlias

from asyncrpc.arguments import check_kind, wrong
from asyncrpc.runtime.worker import Worker

# One that has not been started, or a function that makes one, or one that runs.
WorkerSource: TypeAlias = Worker | Callable[[], Worker]


def check_worker_source(worker: object) -> None:
    """Raise UsageError unless an argument is a worker, or callable."""
    if not isinstance(worker, Worker) and not callable(worker):
        raise wrong("worker", "a Worker, or what makes one", worker)


def worker_of(source: WorkerSource) -> Worker:
    """Return the worker, or what the function makes.

    Raises:
        UsageError: it makes something else.
    """
    chosen = source if isinstance(source, Worker) else source()
    check_kind("what worker() returns", chosen, Worker, "a Worker")
    return chosen


@asynccontextmanager
async def running(worker: Worker) -> AsyncIterator[None]:
    """Start a worker, and end it with the block; leave one that runs as it is.

    Raises:
        RendezvousTimeoutError: not every worker of the group appeared.

    Cancellation:
        A start that is cancelled leaves nothing behind.
    """
    if not worker.is_closed:
        yield
        return
    async with worker:
        yield
