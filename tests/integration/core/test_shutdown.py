"""A graceful end waits for every call, however long the chain that it is at the end of.

And an end alone takes the time that it is given and a second, whatever does not end:
that is counted in virtual time.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncrpc
from asyncrpc import LocalRendezvous, NetworkOptions, Options, Worker, WorkerLostError
from asyncrpc.core.barriers.machine.termination import Phase
from asyncrpc.core.ids import WorkerId
from asyncrpc.core.teardown import CLOSING_S
from asyncrpc.multiprocessing import launch
from asyncrpc.testing import Cluster
from asyncrpc.testing.cluster import sim_worker
from asyncrpc.testing.loop import SimLoop
from asyncrpc.testing.network import Network
from tests.integration.core import call_chains, remote
from tests.integration.core.call_chains import Chain
from tests.integration.core.conftest import Trio
from tests.integration.core.groups import LIMIT_S, processes, until
from tests.integration.core.remote import Watch

DEPTH = 20
HOUR_S = 3600.0  # nobody waits for so long: `LIMIT_S` ends the test before


def now_s() -> float:
    return asyncio.get_running_loop().time()


# --- chains of calls over processes --------------------------------------------------


@pytest.mark.parametrize("at_once", [False, True], ids=["warm", "cold"])
@pytest.mark.parametrize(
    "chain",
    [
        call_chains.in_coroutines,
        call_chains.in_threads,
        call_chains.with_references,
        call_chains.through_streams,
        call_chains.by_turns,
    ],
)
def test_graceful_shutdown_waits_for_an_unawaited_chain(
    chain: Chain, tmp_path: Path, *, at_once: bool
) -> None:
    """Twenty calls deep, over four processes, whether or not they were connected."""
    arguments = (chain, str(tmp_path), DEPTH, at_once)
    ended_s = launch(
        call_chains.end_together, arguments, call_chains.WORLD_SIZE, method="forkserver"
    )
    ran_s = {path.name: float(path.read_text()) for path in tmp_path.iterdir()}
    assert len(ran_s) == DEPTH
    assert min(ended_s) > max(ran_s.values())


# --- together, in one process --------------------------------------------------------


@pytest.mark.parametrize("chains", [1, 3, 30])
async def test_graceful_shutdown_waits_for_busy_chains_in_threads(chains: int) -> None:
    """A thread hands the next call to the loop, and then its own answer."""
    for _ in range(3):
        call_chains.passed.clear()
        async with Cluster(call_chains.WORLD_SIZE) as workers:
            for number in range(chains):
                caller = workers[number % call_chains.WORLD_SIZE]
                caller.parts.start_call(workers[0].name, call_chains.pass_on, (DEPTH,))
            ending = (
                worker.shutdown(graceful=True, timeout_s=15.0) for worker in workers
            )
            await asyncio.gather(*ending)
        assert len(call_chains.passed) == chains * (DEPTH + 1)


async def test_graceful_shutdown_serves_until_all_have_arrived(trio: Trio) -> None:
    a, b, c = trio
    ending = [asyncio.create_task(worker.shutdown(graceful=True)) for worker in (a, b)]
    assert await c.peer("a").call(remote.add, 1) == 2
    rref = c.peer("b").remote(remote.Counter, 3)
    assert await rref.rpc_async().get() == 3
    del rref
    assert not any(task.done() for task in ending)
    await asyncio.gather(*ending, c.shutdown(graceful=True))
    assert a.is_closed
    assert b.is_closed


async def test_shutdown_waits_for_a_call_just_made_by_a_thread() -> None:
    """The function of the thread has answered, and its call has not begun."""
    first, second = remote.watches["1"], remote.watches["2"] = Watch(), Watch()
    async with Cluster(2) as (a, b):
        calls = [
            a.parts.start_call("b", call_chains.call_on, (test, to))
            for test, to in (("1", ""), ("2", "a"))
        ]
        await asyncio.gather(first.begun.wait(), second.begun.wait())
        ending = b.parts.graceful_shutdown
        ending.machine.enter()
        assert ending.machine.join(busy=True, started=0)
        # From here on the loop stands still, and these come to wait in this order: the
        # answers, the look at what is in flight, the call.
        let_end(b, first, 1)
        coming = asyncio.ensure_future(ending._mark(None))  # noqa: SLF001
        let_end(b, second, 2)
        assert await coming is True
        assert ending._count_started() == 1  # noqa: SLF001
        assert not ending._is_busy()  # noqa: SLF001
        await asyncio.gather(*calls)


def let_end(worker: Worker, watch: Watch, finished: int) -> None:
    """Let a function end in its thread, and wait for that without the loop."""
    watch.gate.set()
    while len(worker.parts.pool._finished) < finished:  # noqa: SLF001
        time.sleep(0.001)


async def test_missing_worker_is_named_after_the_timeout(a: Worker, b: Worker) -> None:
    with pytest.raises(TimeoutError, match=r"after 0.3 s 'b', 'c' had not asked"):
        await a.shutdown(graceful=True, timeout_s=0.3, drain_timeout_s=HOUR_S)
    assert a.is_closed
    assert await b.peer("c").call(remote.add, 1) == 2


async def test_busy_worker_is_named_and_its_call_cancelled(
    trio: Trio, caplog: pytest.LogCaptureFixture
) -> None:
    remote.watches["w"] = watch = Watch()
    call = trio[0].parts.start_call("b", remote.wait_for_ever, ("w",))
    await watch.begun.wait()
    together = (
        worker.shutdown(graceful=True, timeout_s=HOUR_S, drain_timeout_s=0.3)
        for worker in trio
    )
    await asyncio.wait_for(asyncio.gather(*together), LIMIT_S)
    assert re.search(r"'a', 'b' still had calls in flight when the time", caplog.text)
    assert watch.notes == ["cancelled on b"]
    with pytest.raises(asyncrpc.CallError):
        await call


async def test_late_call_is_waited_for(trio: Trio) -> None:
    remote.watches["w"] = watch = Watch()
    call = trio[0].parts.start_call("b", remote.pass_gate, ("w",))
    await watch.begun.wait()
    ending = [
        asyncio.create_task(worker.shutdown(graceful=True, timeout_s=LIMIT_S))
        for worker in trio
    ]
    machine = trio[1].parts.graceful_shutdown.machine
    await until(lambda: machine.phase is Phase.DRAINING)
    assert not any(task.done() for task in ending)
    watch.gate.set()
    await asyncio.gather(*ending)
    await call


async def test_worker_that_left_alone_is_not_waited_for(
    a: Worker, b: Worker, c: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    ending = [asyncio.create_task(worker.shutdown(graceful=True)) for worker in (a, b)]
    assert await c.peer("a").call(remote.add, 1) == 2
    await c.shutdown()
    await asyncio.wait_for(asyncio.gather(*ending), LIMIT_S)
    assert "without the others that are gone: 'c'" in caplog.text


async def test_survivors_of_a_large_group_end(caplog: pytest.LogCaptureFixture) -> None:
    """Most workers left unnoticed before, so that each is looked for."""
    async with Cluster(9, options=Options(drain_timeout_s=1.0)) as workers:
        await asyncio.gather(*(worker.shutdown() for worker in workers[2:8]))
        left = (workers[0], workers[1], workers[8])
        ending = (worker.shutdown(graceful=True, timeout_s=15.0) for worker in left)
        await asyncio.gather(*ending)
    assert "'c', 'd', 'e', 'f', 'g', 'h'" in caplog.text


async def test_cancelled_graceful_shutdown_ends_at_once(a: Worker, b: Worker) -> None:
    ending = asyncio.create_task(a.shutdown(graceful=True))
    assert await b.peer("a").call(remote.add, 1) == 2
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(ending, LIMIT_S)
    assert a.is_closed


async def test_plain_shutdown_ends_a_graceful_one(a: Worker, b: Worker) -> None:
    graceful = asyncio.create_task(a.shutdown(graceful=True))
    assert await b.peer("a").call(remote.add, 1) == 2
    await a.shutdown()
    await asyncio.wait_for(graceful, LIMIT_S)
    assert a.is_closed


async def test_a_worker_without_a_rank_ends_alone() -> None:
    worker = Worker(
        "a", rendezvous={"a": ()}, options=Options(network=NetworkOptions(listen=()))
    )
    await worker.__aenter__()
    await asyncio.wait_for(worker.shutdown(graceful=True), LIMIT_S)
    assert worker.is_closed


# --- alone, whatever does not end ----------------------------------------------------


async def ignore_cancellation(test: str) -> None:
    """Go on, however often this is cancelled, until the test lets it end."""
    watch = remote.watches[test]
    watch.begun.set()
    while not watch.ended.is_set():
        try:
            await watch.ended.wait()
        except asyncio.CancelledError:
            watch.notes.append("cancelled")


class Endless(LocalRendezvous):
    """A meeting place that cannot be left."""

    async def leave(self, timeout_s: float) -> None:
        await asyncio.Event().wait()


class Stuck:
    """A part of a worker whose end does not end, or fails."""

    routes = ()

    def __init__(self, name: str, error: Exception | None) -> None:
        self.name = name
        self._error = error

    def on_peer_lost(self, peer: WorkerId, reason: str) -> None:
        pass

    async def close(self) -> None:
        if self._error is not None:
            raise self._error
        await asyncio.Event().wait()


class TestInVirtualTime:
    """Where what a shutdown may take is exact."""

    loops = {"sim": SimLoop}  # noqa: RUF012  (read once, by the conftest)

    async def test_coroutine_that_ignores_cancellation_is_left_behind(self) -> None:
        remote.watches["w"] = watch = Watch()
        async with Cluster(2, network=Network(0)) as (a, b):
            call = a.parts.start_call("b", ignore_cancellation, ("w",))
            await watch.begun.wait()
            began_s = now_s()
            await b.shutdown(drain_timeout_s=0.1)
            assert 0.1 <= now_s() - began_s <= 0.1 + CLOSING_S
            assert watch.notes
            with pytest.raises(WorkerLostError):
                await call
        watch.ended.set()

    async def test_endless_parts_delay_the_shutdown_by_a_second(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        worker = sim_worker("a", Network(0), rank=0, rendezvous=Endless(1))
        async with worker:
            worker.parts.add_service(Stuck("stuck", None))
            worker.parts.add_service(Stuck("broken", ZeroDivisionError("at its end")))
            began_s = now_s()
        assert now_s() - began_s <= CLOSING_S
        assert "its service 'stuck' did not end in time" in caplog.text
        assert "its service 'broken' failed while it ended" in caplog.text
        assert "its rendezvous did not end in time" in caplog.text
        assert worker.parts.directory.links == []

    async def test_repeated_cancellation_hurries_the_shutdown(self) -> None:
        worker = sim_worker("a", Network(0), rank=0, rendezvous=Endless(1))
        await worker.__aenter__()
        worker.parts.add_service(Stuck("stuck", None))
        remote.watches["w"] = watch = Watch()
        call = worker.parts.start_call("a", remote.wait_for_ever, ("w",))
        await watch.begun.wait()
        ending = asyncio.create_task(worker.shutdown(drain_timeout_s=HOUR_S))
        await asyncio.sleep(0)
        began_s = now_s()
        for _ in range(3):  # the first ends the drain; the others hurry the rest
            ending.cancel()
            await asyncio.sleep(0.01)
        with pytest.raises(asyncio.CancelledError):
            await ending
        assert now_s() - began_s < CLOSING_S / 2
        assert worker.is_closed
        assert watch.notes == ["cancelled on a"]
        with pytest.raises(asyncrpc.CallError):
            await call


@pytest.mark.parametrize("transport", ["uds", "tcp"])
async def test_stopped_peer_of_full_buffers_delays_no_shutdown(transport: Any) -> None:
    options = Options(
        drain_timeout_s=0.3,
        limits=asyncrpc.LimitOptions(shared_memory_bytes=0),
        liveness=asyncrpc.LivenessOptions(lost_after_s=HOUR_S),
    )
    async with (cluster := processes("b", transport=transport, options=options)) as a:
        await a.peer("b").call(remote.add, 1)
        cluster.kill("b", signal.SIGSTOP)
        try:
            calls = [
                a.parts.start_call("b", remote.echo, (torch.zeros(8 << 20),))
                for _ in range(4)
            ]
            calls += [a.parts.start_call("b", remote.add, (1,)) for _ in range(1000)]
            async with asyncio.timeout(LIMIT_S):
                await a.shutdown()  # as much is written meanwhile as the kernel takes
            ended = await asyncio.gather(*calls, return_exceptions=True)
            assert all(isinstance(result, asyncrpc.CallError) for result in ended)
        finally:
            os.kill(cluster.pid("b"), signal.SIGKILL)


async def test_result_by_shared_memory_outlives_both_workers() -> None:
    async with Cluster(2, network="uds") as (a, b):
        sent = torch.arange(float(1 << 20))
        got = await a.peer("b").call(remote.double, sent)
        await asyncio.gather(*(worker.shutdown(graceful=True) for worker in (a, b)))
    assert torch.equal(got, 2 * sent)
