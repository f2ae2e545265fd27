"""Groups whose workers are described one by one, and programs in processes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from asyncrpc import LocalRendezvous, Options, Worker
from asyncrpc.testing import ProcessCluster

REPOSITORY = Path(__file__).parents[3]
LIMIT_S = 60.0  # for one wait; only a failure reaches it


async def until(is_so: Callable[[], bool], step_s: float = 0.001) -> None:
    """Wait for what no event tells of: counters, and what sockets bring about."""
    async with asyncio.timeout(LIMIT_S):
        while not is_so():  # noqa: ASYNC110  (nothing tells)
            await asyncio.sleep(step_s)


@contextlib.contextmanager
def logged(text: str) -> Iterator[asyncio.Event]:
    """Give an event that is set once a line of the log has a text."""
    event = asyncio.Event()

    class _Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if text in record.getMessage():
                event.set()

    logger, handler = logging.getLogger("asyncrpc"), _Handler()
    logger.addHandler(handler)
    try:
        yield event
    finally:
        logger.removeHandler(handler)


def alone(name: str, options: Options | None = None) -> Worker:
    """Make a worker that is a group of its own."""
    return Worker(name, rank=0, rendezvous=LocalRendezvous(1), options=options)


def processes(
    *names: str, transport: Any = "uds", options: Options | None = None
) -> ProcessCluster:
    """Make a worker here and one in each of some processes: a fork server is quick."""
    return ProcessCluster(
        names, transport=transport, method="forkserver", options=options
    )


@asynccontextmanager
async def started(*workers: Worker) -> AsyncIterator[None]:
    """Start workers at once; end those that started, in whatever way the block ends."""
    async with AsyncExitStack() as stack:
        try:
            async with asyncio.TaskGroup() as starting:
                for worker in workers:
                    starting.create_task(worker.__aenter__())
        finally:
            for worker in workers:
                stack.push_async_callback(worker.shutdown)
        yield


async def outcomes(*workers: Worker) -> list[BaseException | Worker]:
    """Start workers at once, end them; return the error of each, or the worker."""
    starting = (worker.__aenter__() for worker in workers)
    results = await asyncio.gather(*starting, return_exceptions=True)
    await asyncio.gather(*(worker.shutdown() for worker in workers))
    return results


@contextlib.contextmanager
def program(*arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Run the interpreter with `arguments`; whatever happens, it ends."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in {"ASYNCRPC_SECRET", "RANK", "WORLD_SIZE", "OMP_NUM_THREADS"}
    }
    with subprocess.Popen(
        [sys.executable, *arguments],
        env={**inherited, "PYTHONPATH": str(REPOSITORY), **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()
