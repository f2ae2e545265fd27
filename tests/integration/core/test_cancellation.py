"""Who gives up a call ends what it set off everywhere, and disturbs nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import torch

from asyncrpc import Options, Worker
from asyncrpc.testing import Cluster
from tests.integration.core import remote
from tests.integration.core.conftest import Trio
from tests.integration.core.groups import processes
from tests.integration.core.remote import Watch

MIB = 1 << 20


@pytest.fixture
def watch() -> Iterator[Watch]:
    remote.watches["w"] = watcher = Watch()
    yield watcher
    del remote.watches["w"]


async def test_a_task_two_hops_away_is_cancelled(wired: Trio, watch: Watch) -> None:
    a, _, _ = wired
    call = asyncio.create_task(
        a.peer("b").call(remote.forward, ["c"], remote.wait_for_ever, "w")
    )
    await watch.begun.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await asyncio.wait_for(watch.ended.wait(), 30)
    assert watch.notes == ["cancelled on c"]


async def test_thread_learns_of_its_cancellation(wired: Trio, watch: Watch) -> None:
    a, _, _ = wired
    call = a.parts.start_call("b", remote.wait_in_thread, ("w",))
    await watch.begun.wait()
    call.cancel()
    await asyncio.wait_for(watch.ended.wait(), 30)
    assert watch.notes == ["saw it"]


async def test_cancelled_caller_waits_for_no_callee(a: Worker, watch: Watch) -> None:
    call = asyncio.create_task(a.peer("b").call(remote.pass_gate, "w"))
    await watch.begun.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert not watch.gate.is_set()
    watch.gate.set()


async def test_call_cancelled_before_a_thread_is_free_never_runs(watch: Watch) -> None:
    async with Cluster(2, options=Options(threads=1)) as (a, b):
        first = a.parts.start_call("b", remote.pass_gate, ("w",))
        await watch.begun.wait()
        second = a.parts.start_call("b", remote.note, ("w", "ran"))
        await a.peer("b").call(remote.note_async, "w", "second is queued")
        second.cancel()
        await a.peer("b").call(remote.note_async, "w", "second is given up")
        watch.gate.set()
        assert await first == "through"
        await a.peer("b").call(remote.note, "w", "after")
        assert "ran" not in watch.notes
        assert not b.parts.active


async def test_call_cancelled_while_dialing_never_runs(a: Worker, watch: Watch) -> None:
    a.parts.start_call("b", remote.note, ("w", "ran")).cancel()
    await a.peer("b").call(remote.note, "w", "after")
    assert watch.notes == ["after"]


@pytest.mark.parametrize("turns", [0, 1, 3, 10])
async def test_cancelled_transfer_leaves_a_connection(wired: Trio, turns: int) -> None:
    a, b, _ = wired
    await a.peer("b").call(remote.add, 1)
    link = a.parts.directory.find("b").link
    large = torch.ones(8 * MIB)
    call = a.parts.start_call("b", remote.total, (large,))
    for _ in range(turns):
        await asyncio.sleep(0)
    call.cancel()
    assert await a.peer("b").call(remote.total, torch.ones(5)) == 5
    assert await a.peer("b").call(remote.total, large) == 8 * MIB
    assert a.parts.directory.find("b").link is link
    assert not b.parts.active


async def test_cancelled_result_leaves_the_connection_usable(wired: Trio) -> None:
    a, b, _ = wired
    await a.peer("b").call(remote.add, 1)
    for turns in (2, 5, 20):
        call = a.parts.start_call("b", torch.ones, (4 * MIB,))
        for _ in range(turns):
            await asyncio.sleep(0)
        call.cancel()
        assert await a.peer("b").call(remote.add, 1) == 2
    assert torch.equal(await a.peer("b").call(torch.ones, 5), torch.ones(5))
    assert not b.parts.active


async def test_cancelled_calls_leave_the_other_calls_running(wired: Trio) -> None:
    a, b, _ = wired
    calls = [a.parts.start_call("b", remote.add_async, (i,)) for i in range(200)]
    for call in calls[::2]:
        call.cancel()
    assert [await call for call in calls[1::2]] == [i + 1 for i in range(1, 200, 2)]
    await a.peer("b").call(remote.add_on_loop, 1)
    assert not b.parts.active


async def test_cancellation_crosses_processes() -> None:
    async with processes("b", "c") as a:
        counter = a.peer("c").remote(remote.Sleeper)
        call = asyncio.create_task(
            a.peer("b").call(remote.forward, ["c"], remote.sleep_on, counter)
        )
        await counter.rpc_async().wait_begun()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await asyncio.wait_for(counter.rpc_async().wait_cancelled(), 30) == "c"
