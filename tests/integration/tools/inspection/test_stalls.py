"""A worker that is to say by itself why it does not go on says it once, and rightly."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import pytest
import pytest_asyncio

import asyncrpc
from asyncrpc import LocalRendezvous, Options, Worker
from asyncrpc.testing import Cluster, ProcessCluster
from asyncrpc.tools.inspection.presence import HostPresence
from tests.integration.tools.inspection import hanging

AFTER_S: Final = 0.5
GENEROUS_S: Final = 60.0
OPTIONS: Final = Options(secret="a secret of this test", drain_timeout_s=0.0)
WATCHED: Final = replace(OPTIONS, stall_after_s=AFTER_S)


class Log(logging.Handler):
    """Keeps what asyncrpc logs, and tells who waits for it."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        self._loop.call_soon_threadsafe(self._changed.set)

    async def hears(self, wanted: str, *, times: int = 1) -> None:
        """Wait until so many lines read so."""
        try:
            async with asyncio.timeout(GENEROUS_S):
                while len(self.like(wanted)) < times:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pytest.fail(f"nothing reads like {wanted!r}; there is: {self.lines}")

    def like(self, wanted: str) -> list[str]:
        return [line for line in self.lines if re.search(wanted, line)]


@contextmanager
def listening() -> Iterator[Log]:
    log, logger = Log(), logging.getLogger("asyncrpc")
    logger.addHandler(log)
    try:
        yield log
    finally:
        logger.removeHandler(log)


@pytest_asyncio.fixture
async def log() -> AsyncIterator[Log]:
    with listening() as listened:
        yield listened


@pytest_asyncio.fixture
async def trainer() -> AsyncIterator[Worker]:
    """A worker that says why it waits, and one that does not."""
    cluster = ProcessCluster(
        ["ps", "cache"], name="trainer", method="forkserver", options=WATCHED
    )
    async with cluster as worker:
        yield worker


def stalls_of(worker: Worker) -> Any:
    service = worker.parts.service("presence")
    assert isinstance(service, HostPresence)
    return service.stalls


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(GENEROUS_S):
        while not holds():  # noqa: ASYNC110  (a thread of the worker changes it)
            await asyncio.sleep(0.01)


@contextmanager
def running(coroutine: Any, name: str) -> Iterator[asyncio.Task[None]]:
    """Run a coroutine for as long as the block lasts."""
    task = asyncio.create_task(coroutine, name=name)
    try:
        yield task
    finally:
        task.cancel()


async def hang(worker: Worker, function: Any) -> None:
    await worker.peer("ps").call(function)


CYCLE: Final = (
    r"^worker 'trainer' is stuck: trainer task `train` waits [\d.]+ s for ps "
    r"`evict`, which waits for trainer `rows`, which waits for ps `apply`, which waits "
    r"for Lock `table` held by ps task `evict`: a cycle, which nothing can end$"
)
EVENT: Final = (
    r"^worker 'trainer' is stuck: trainer task `reader` waits [\d.]+ s for ps "
    r"`wait_for_event`, which waits for Event `done`: nothing else refers to it, so "
    r"nothing can set it \(hanging.py:\d+ in wait_for_event\)$"
)


async def test_stall_is_logged_once(trainer: Worker, log: Log) -> None:
    with running(hang(trainer, hanging.evict), "train"):
        await log.hears(CYCLE)
        with running(hang(trainer, hanging.wait_for_event), "reader"):
            await log.hears(EVENT)
        assert len(log.like("is stuck")) == 2


async def test_repeated_stall_is_logged_again(trainer: Worker, log: Log) -> None:
    for times in (1, 2):
        with running(hang(trainer, hanging.wait_for_event), "reader"):
            await log.hears(EVENT, times=times)
        await until(lambda: not stalls_of(trainer).open)
    assert len(log.lines) == 2


async def test_unresponsive_worker_is_named(trainer: Worker, log: Log) -> None:
    pid = await trainer.peer("ps").call(os.getpid)
    os.kill(pid, signal.SIGSTOP)
    try:
        with running(hang(trainer, hanging.wait_for_event), "train"):
            await log.hears(
                r"trainer task `train` waits [\d.]+ s for ps, which is stuck: "
                rf"its process is stopped, process {pid}: `kill -CONT {pid}`"
            )
    finally:
        os.kill(pid, signal.SIGCONT)


async def test_a_blocked_loop_is_named_by_its_own_worker(log: Log) -> None:
    go, begun = threading.Event(), threading.Event()

    async def block() -> None:
        alone = LocalRendezvous(1)
        options = replace(WATCHED, secret=None)
        async with Worker(
            "ps", rank=0, world_size=1, rendezvous=alone, options=options
        ):
            begun.set()
            go.wait()

    thread = threading.Thread(target=asyncio.run, args=(block(),), name="looping")
    thread.start()
    try:
        await log.hears(
            r"^worker 'ps' is stuck: its event loop is blocked, [\d.]+ s: thread "
            r"`looping` runs `go.wait\(\)` \(test_stalls.py:\d+ in .*block\)$"
        )
    finally:
        go.set()
        await asyncio.to_thread(thread.join)
    assert len(log.lines) == 1


async def test_idle_wait_is_not_named(log: Log) -> None:
    async def serve() -> None:
        await asyncio.Event().wait()

    async with Cluster(2, network="uds", options=WATCHED) as (a, b):
        await a.peer("b").call(int)
        with running(serve(), "server"), running(serve(), "another"):
            await until(lambda: all(stalls_of(worker).judged for worker in (a, b)))
            judged = stalls_of(a).judged
            with running(serve(), "a third"):
                await until(lambda: bool(stalls_of(a).judged - judged))
    assert log.lines == []


async def test_missing_worker_at_a_barrier_is_asked_for_its_task(
    trainer: Worker, log: Log
) -> None:
    with running(trainer.barrier(), "train"):
        await log.hears(
            r"^worker 'trainer' is stuck: trainer task `train` waits [\d.]+ s "
            r"for barrier \d+, to which \S+ and 1 more have not come: (ps|cache) task"
        )


async def test_simulation_has_no_stall_watch() -> None:
    async with Cluster(1, options=WATCHED) as (worker,):
        assert stalls_of(worker) is None


async def test_program_may_ask_for_its_own_stalls(trainer: Worker) -> None:
    assert await asyncrpc.inspection.why(worker=trainer) == []
    with running(hang(trainer, hanging.evict), "train"):
        async with asyncio.timeout(GENEROUS_S):
            while not (
                stalls := await asyncrpc.inspection.why(after_s=0.2, worker=trainer)
            ) or not stalls[0].endswith("which nothing can end"):
                pass
    (said,) = stalls
    assert said.startswith("trainer task `train` waits ")
