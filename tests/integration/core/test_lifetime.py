"""Workers end in order, or at once, and nobody waits for the dead."""

from __future__ import annotations

import asyncio

import pytest
import torch

import asyncrpc
from asyncrpc import LocalRendezvous, Outcome, RejectedError, Worker, WorkerLostError
from asyncrpc.testing import acting_as
from tests.integration.core import remote
from tests.integration.core.conftest import Trio
from tests.integration.core.groups import processes
from tests.integration.core.remote import Watch

NEVER_S = 3600.0  # what waits for this hangs


async def test_shutdown_lets_incoming_calls_end(wired: Trio) -> None:
    a, b, _ = wired
    slow = a.parts.start_call("b", remote.slow_one)
    await a.peer("b").call(remote.add, 1)
    await b.shutdown()
    assert await slow == 1


async def test_shutdown_waits_for_outgoing_calls(a: Worker) -> None:
    await a.peer("b").call(remote.add, 1)
    slow = a.parts.start_call("b", remote.slow_one)
    await a.shutdown()
    assert await slow == 1


async def test_unconnected_call_ends_with_its_worker(wired: Trio) -> None:
    a, _, _ = wired
    call = a.parts.start_call("b", remote.add, (1,))
    items = a.peer("c").stream(remote.count_to, 3)
    first = asyncio.ensure_future(anext(items))
    await asyncio.sleep(0)
    await a.shutdown()
    async with asyncio.timeout(2):
        errors = await asyncio.gather(call, first, return_exceptions=True)
    assert isinstance(errors[0], WorkerLostError)
    assert errors[0].outcome is Outcome.NOT_EXECUTED
    assert isinstance(errors[1], WorkerLostError | asyncrpc.errors.ClosedError)


async def test_calls_to_a_closing_worker_are_not_executed(a: Worker, b: Worker) -> None:
    slow = a.parts.start_call("b", remote.slow_one)
    await a.peer("b").call(remote.add, 1)
    ending = asyncio.create_task(b.shutdown())
    await asyncio.sleep(0)
    with pytest.raises((RejectedError, WorkerLostError)) as caught:
        await a.peer("b").call(remote.add, 1)
    assert caught.value.outcome is Outcome.NOT_EXECUTED
    assert await slow == 1
    await ending


async def test_work_beyond_the_drain_timeout_is_cancelled(a: Worker, b: Worker) -> None:
    remote.watches["w"] = watch = Watch()
    call = a.parts.start_call("b", remote.wait_for_ever, ("w",))
    await watch.begun.wait()
    await b.shutdown(drain_timeout_s=0.1)
    assert watch.notes == ["cancelled on b"]
    with pytest.raises(asyncrpc.CallError):
        await call


async def test_workers_leave_together(wired: Trio) -> None:
    async def leave(worker: asyncrpc.Worker) -> None:
        with acting_as(worker):
            await asyncrpc.shutdown()

    await asyncio.gather(*(leave(worker) for worker in wired))
    assert all(worker.is_closed for worker in wired)
    assert all(worker.parts.active == 0 for worker in wired)


async def test_connections_are_made_again_after_a_break(wired: Trio) -> None:
    a, b, _ = wired
    remote.watches["w"] = watch = Watch()
    for victim, name in ((a, "b"), (b, "a")):
        await a.peer("b").call(remote.add, 1)
        watch.begun.clear()
        lost = a.parts.start_call("b", remote.wait_for_ever, ("w",))
        await watch.begun.wait()
        link = victim.parts.directory.find(name).link
        assert link is not None
        link.connection.fail(asyncrpc.errors.ConnectionLostError("cut by the test"))
        with pytest.raises(WorkerLostError) as caught:
            await lost
        assert caught.value.outcome is Outcome.UNKNOWN
        assert await a.peer("b").call(remote.add, 1) == 2


async def test_cancelled_start_leaves_nothing_behind() -> None:
    worker = Worker("w", rank=0, rendezvous=LocalRendezvous(2))
    task = asyncio.create_task(worker.__aenter__())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert worker.is_closed


async def test_init_rpc_and_shutdown_set_the_current_worker() -> None:
    where = LocalRendezvous(1)
    worker = await asyncrpc.init_rpc("w", rank=0, rendezvous=where)
    assert asyncrpc.current_worker() is worker
    with pytest.raises(asyncrpc.errors.AlreadyStartedError):
        asyncrpc.init_rpc("x", rank=0, rendezvous=where)
    assert await asyncrpc.rpc_async("w", remote.add, (1,)) == 2
    await asyncrpc.shutdown()
    with pytest.raises(asyncrpc.errors.NotStartedError):
        asyncrpc.current_worker()


@pytest.mark.parametrize("transport", ["uds", "tcp"])
async def test_a_killed_peer_fails_its_calls_at_once(transport: str) -> None:
    cluster = processes(
        "b",
        "c",
        transport=transport,
        options=asyncrpc.Options(
            drain_timeout_s=NEVER_S,
            liveness=asyncrpc.LivenessOptions(lost_after_s=NEVER_S),
        ),
    )
    async with cluster as a:
        rref = a.peer("b").remote(remote.Counter)
        await rref
        call = a.parts.start_call("b", remote.sleep_long)
        through = a.parts.start_call("c", remote.forward, (["b"], remote.sleep_long))
        await a.peer("b").call(remote.add, 1)
        cluster.kill("b")
        with pytest.raises(WorkerLostError, match="'b'") as caught:
            await call
        assert caught.value.outcome is Outcome.UNKNOWN
        with pytest.raises(WorkerLostError) as passed_on:  # by c, which did run it
            await through
        assert passed_on.value.outcome is Outcome.EXECUTED
        with pytest.raises(asyncrpc.OwnerLostError):
            await rref.to_here()
        with pytest.raises(WorkerLostError):
            await a.peer("b").call(remote.add, 1)
        assert await a.peer("c").call(remote.add, 1) == 2


async def test_tensors_cross_processes() -> None:
    async with processes("b", transport="tcp") as a:
        large = torch.arange(1 << 21, dtype=torch.float32)
        assert torch.equal(await a.peer("b").call(remote.double, large), large * 2)
        items = [item async for item in a.peer("b").stream(remote.count_to, 50)]
        assert items == list(range(50))
