"""A worker that is busy from its first moment on is waited for, as one later is."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, Final

import pytest

from asyncrpc import LivenessOptions, NetworkOptions, Options, Worker, WorkerLostError
from asyncrpc.core.links.machine.detector import Evidence
from asyncrpc.core.members import Member

SECRET: Final = "of a test, and long enough to be one"
LIMIT_S: Final = 60.0  # for one wait; only a failure reaches it
CONNECT_S: Final = 0.5  # shorter than `b` is busy, whatever the machine does


def options_of(scheme: str) -> Options:
    """Return options of workers that see each other's processes by one way alone."""
    if scheme == "uds":  # the kernel says which process listens
        return Options(network=NetworkOptions(connect_timeout_s=CONNECT_S))
    return Options(
        secret=SECRET,
        network=NetworkOptions(
            listen=("tcp://127.0.0.1:0",), connect_timeout_s=CONNECT_S
        ),
        liveness=LivenessOptions(sidecar="on"),
    )


def be_busy(scheme: str, store: str, gate: Event) -> None:
    """Block the event loop as soon as the group has met, until the gate is open."""

    async def main() -> None:
        where, options = f"file://{store}", options_of(scheme)
        async with Worker(
            "b", rank=1, world_size=2, rendezvous=where, options=options
        ) as worker:
            gate.wait(LIMIT_S)
            await worker.shutdown(graceful=True)

    asyncio.run(main())


class SeenEvidence:
    """What a worker has found out about processes that it has not met."""

    def __init__(self, worker: Worker) -> None:
        self.seen: list[Evidence] = []
        self._changed = asyncio.Event()
        dialer: Any = worker.parts.directory._dialer  # noqa: SLF001
        self._ask = dialer._processes.evidence_of_unmet  # noqa: SLF001
        dialer._processes = self  # noqa: SLF001

    async def evidence_of_unmet(self, member: Member, listener_pid: int) -> Evidence:
        evidence: Evidence = await self._ask(member, listener_pid)
        self.seen.append(evidence)
        self._changed.set()
        return evidence

    async def until(self, evidence: Evidence, times: int) -> None:
        async with asyncio.timeout(LIMIT_S):
            while self.seen.count(evidence) < times:
                self._changed.clear()
                await self._changed.wait()


@asynccontextmanager
async def busy_peer(
    scheme: str, folder: Path
) -> AsyncIterator[tuple[Worker, SeenEvidence, Event, Any]]:
    context = multiprocessing.get_context("forkserver")
    gate, store = context.Event(), str(folder / "store")
    process = context.Process(target=be_busy, args=(scheme, store, gate))
    process.start()
    try:
        async with Worker(
            "a",
            rank=0,
            world_size=2,
            rendezvous=f"file://{store}",
            options=options_of(scheme),
        ) as worker:
            yield worker, SeenEvidence(worker), gate, process
    finally:
        process.kill()
        process.join()
        process.close()


async def call(worker: Worker) -> None:
    assert await worker.peer("b").call(abs, -1) == 1


async def end(worker: Worker) -> None:
    await worker.shutdown(graceful=True)


@pytest.mark.parametrize("scheme", ["uds", "tcp"])
@pytest.mark.parametrize("wait", [call, end])
async def test_a_worker_busy_from_its_start_is_waited_for(
    scheme: str, wait: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with busy_peer(scheme, tmp_path) as (worker, evidence, gate, process):
        task = asyncio.ensure_future(wait(worker))
        await evidence.until(Evidence.BUSY, times=2)
        gate.set()
        await asyncio.wait_for(task, LIMIT_S)
        await worker.shutdown(graceful=True)
        await asyncio.to_thread(process.join, LIMIT_S)
        assert process.exitcode == 0
    assert not [record for record in caplog.records if "gone" in record.getMessage()]


@pytest.mark.parametrize("scheme", ["uds", "tcp"])
async def test_worker_that_dies_while_busy_is_lost(scheme: str, tmp_path: Path) -> None:
    async with busy_peer(scheme, tmp_path) as (worker, evidence, _, process):
        task = asyncio.ensure_future(call(worker))
        await evidence.until(Evidence.BUSY, times=1)
        os.kill(process.pid, 9)
        with pytest.raises(WorkerLostError):
            await asyncio.wait_for(task, LIMIT_S)
        await asyncio.wait_for(worker.shutdown(graceful=True), LIMIT_S)
