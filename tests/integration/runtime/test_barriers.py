"""A barrier opens for all at once, and fails for all who wait when one is lost."""

from __future__ import annotations

import asyncio

import pytest

import asyncrpc
from asyncrpc import Worker, WorkerLostError
from asyncrpc.testing import acting_as
from tests.integration.runtime import remote
from tests.integration.runtime.conftest import Trio
from tests.integration.runtime.groups import LIMIT_S


async def test_nobody_passes_a_barrier_before_all_have_come(wired: Trio) -> None:
    for late in range(3):
        waiting = [
            asyncio.create_task(worker.barrier())
            for worker in wired
            if worker.rank != late
        ]
        ended, _ = await asyncio.wait(waiting, timeout=0.05)
        assert not ended
        await wired[late].barrier(LIMIT_S)
        await asyncio.wait_for(asyncio.gather(*waiting), LIMIT_S)


@pytest.mark.parametrize("lost", [0, 1, 2])
@pytest.mark.parametrize("connected", [True, False])
async def test_a_lost_worker_fails_the_barrier_of_all(
    trio: Trio, lost: int, *, connected: bool
) -> None:
    """Whoever it is, and whether or not anybody had called it before."""
    if connected:
        await asyncio.gather(*(worker.barrier(LIMIT_S) for worker in trio))
    left = [worker for worker in trio if worker.rank != lost]
    waiting = [asyncio.create_task(worker.barrier()) for worker in left]
    await asyncio.sleep(0.05)  # they have come and wait for the one that is lost
    await trio[lost].shutdown(drain_timeout_s=0.0)
    async with asyncio.timeout(LIMIT_S):
        errors = await asyncio.gather(*waiting, return_exceptions=True)
    for error in errors:
        assert isinstance(error, WorkerLostError)
        assert repr(trio[lost].name) in str(error)


async def test_who_gives_up_a_barrier_fails_that_of_the_others(trio: Trio) -> None:
    a, b, _ = trio
    patient = asyncio.create_task(b.barrier())
    with pytest.raises(TimeoutError):
        await a.barrier(0.05)
    with pytest.raises(WorkerLostError, match="worker 'a' gave up"):
        await asyncio.wait_for(patient, LIMIT_S)


async def test_a_graceful_end_waits_for_all(trio: Trio) -> None:
    async def end(worker: Worker) -> None:
        with acting_as(worker):
            await asyncrpc.shutdown(timeout=LIMIT_S)

    a, b, c = trio
    first = asyncio.create_task(end(a))
    second = asyncio.create_task(end(b))
    assert await c.peer("a").call(remote.add, 1) == 2
    assert not first.done()
    await asyncio.gather(first, second, end(c))
    assert a.is_closed


async def test_a_graceful_end_does_without_a_worker_that_died(
    trio: Trio, caplog: pytest.LogCaptureFixture
) -> None:
    a, b, c = trio
    await c.shutdown(drain_timeout_s=0.0)
    for worker in (a, b):
        with acting_as(worker):
            await asyncrpc.shutdown(timeout=LIMIT_S)
    assert a.is_closed
    assert "shutting down without the others" in caplog.text
