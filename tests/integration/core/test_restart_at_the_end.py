"""A worker that is killed and restarted ends together with the others."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import pytest

import asyncrpc
from asyncrpc import Options, Worker

SIZE: Final = 3
LIMIT_S: Final = 120.0  # only a failure reaches it
OPTIONS: Final = Options(secret="of a test, and long enough to be one")


def serve(rank: int, store: str, reports: Connection) -> None:
    """Have no main line but the end of the group."""

    async def main() -> None:
        async with Worker(
            f"w{rank}",
            rank=rank,
            world_size=SIZE,
            rendezvous=f"file://{store}",
            options=OPTIONS,
        ) as worker:
            await worker.shutdown(graceful=True)

    asyncio.run(main())
    reports.send("ended")


@pytest.mark.parametrize("killed", [1, 2])
@pytest.mark.parametrize("times", [1, 2])
async def test_a_restarted_worker_serves_until_the_others_end(
    killed: int, times: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    context = multiprocessing.get_context("forkserver")
    here, there = context.Pipe(duplex=False)
    store, name = str(tmp_path / "store"), f"w{killed}"
    processes: list[Any] = []

    def start(rank: int) -> Any:
        process = context.Process(target=serve, args=(rank, store, there))
        process.start()
        processes.append(process)
        return process

    try:
        present = {rank: start(rank) for rank in (1, 2)}
        async with Worker(
            "w0", rank=0, world_size=SIZE, rendezvous=f"file://{store}", options=OPTIONS
        ) as worker:
            changes = worker.members_changed()
            for _ in range(times):
                await asyncio.wait_for(worker.peer(name).call(os.getpid), LIMIT_S)
                os.kill(present[killed].pid, signal.SIGKILL)
                present[killed] = start(killed)
                async for change in changes:
                    if change.kind == "restarted":
                        break
                # Its main line is at the end already, as that of the other is.
                await asyncio.wait_for(worker.peer(name).call(is_ending), LIMIT_S)
            assert not here.poll()
            assert await worker.peer(name).call(os.getpid) == present[killed].pid
            await worker.shutdown(graceful=True)
        for _ in present:
            assert await asyncio.to_thread(here.poll, LIMIT_S)
            assert here.recv() == "ended"
    finally:
        for process in processes:
            process.kill()
            process.join()
            process.close()
        here.close()
        there.close()
    assert not [record for record in caplog.records if "gone" in record.getMessage()]


async def is_ending() -> None:
    """Wait until the current worker waits for the end of the group."""
    worker = asyncrpc.current_worker()
    while not worker.parts.graceful_shutdown.has_begun:  # noqa: ASYNC110  (nothing tells)
        await asyncio.sleep(0.01)
