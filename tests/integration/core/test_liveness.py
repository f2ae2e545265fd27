"""Who is dead, and who is only busy: real processes, killed, stopped and kept busy."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

import asyncrpc
from asyncrpc import LivenessOptions, Options, Outcome, OwnerLostError, WorkerLostError
from asyncrpc.core.links import heartbeat
from tests.integration.core import remote
from tests.integration.core.groups import processes, until

# A tenth of the defaults: what they promise is in proportion.
OPTIONS = Options(
    liveness=LivenessOptions(heartbeat_s=0.2, lost_after_s=1.0), drain_timeout_s=0.5
)
BUSY_S = 4.0  # several times what makes a silent peer lost
# And time to be scheduled.
SOON_S = OPTIONS.liveness.lost_after_s + OPTIONS.liveness.heartbeat_s + 5.0


def hold_the_interpreter(seconds: float) -> str:
    """Let no other Python thread of this process run."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))
    return "held"


@asyncrpc.on_loop
def hold_the_loop(seconds: float) -> str:
    """Let threads run, but nothing on the event loop."""
    time.sleep(seconds)
    return "held"


async def values_owned() -> int:
    references: Any = asyncrpc.current_worker().parts.references
    return int(references.counts()["owned"])


async def lose(call: asyncio.Future[Any]) -> WorkerLostError:
    with pytest.raises(WorkerLostError) as caught:
        await asyncio.wait_for(call, SOON_S)
    return caught.value


@pytest.mark.parametrize(
    ("transport", "hold"), [("uds", hold_the_interpreter), ("tcp", hold_the_loop)]
)
async def test_busy_worker_is_awaited(
    transport: str, hold: Callable[[float], str]
) -> None:
    async with processes("b", transport=transport, options=OPTIONS) as a:
        link = await a.parts.link_to("b")
        holding = a.peer("b").call(hold, BUSY_S)
        assert await a.peer("b").call(remote.add, 1) == 2
        assert await holding == "held"
        assert await a.parts.link_to("b") is link  # resumed, maybe, and the same


async def test_busy_worker_elsewhere_is_awaited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As if it were: its host is not looked at, only asked over the network."""
    monkeypatch.setattr(heartbeat, "HOST_ID", "another kernel")
    options = replace(OPTIONS, liveness=replace(OPTIONS.liveness, sidecar="on"))
    async with (cluster := processes("b", transport="tcp", options=options)) as a:
        link = await a.parts.link_to("b")
        holding = a.peer("b").call(hold_the_interpreter, BUSY_S)
        assert await a.peer("b").call(remote.add, 1) == 2
        assert await holding == "held"
        assert await a.parts.link_to("b") is link  # resumed, maybe, and the same
        waiting = asyncio.ensure_future(a.peer("b").call(asyncio.sleep, 60))
        await until(lambda: len(link.pending) > 0)  # it is sent before the worker dies
        cluster.kill("b")
        assert (await lose(waiting)).outcome is Outcome.UNKNOWN


@pytest.mark.parametrize("transport", ["uds", "tcp"])
async def test_a_stopped_worker_is_lost_and_comes_back(transport: str) -> None:
    async with (cluster := processes("b", transport=transport, options=OPTIONS)) as a:
        theirs = a.peer("b").remote(list)
        await theirs.to_here()
        waiting = asyncio.ensure_future(a.peer("b").call(asyncio.sleep, 60))
        rows = a.peer("b").stream(remote.count_to, 1_000_000)
        assert await anext(rows) == 0
        os.kill(cluster.pid("b"), signal.SIGSTOP)
        try:
            error = await lose(waiting)
            with pytest.raises(WorkerLostError):
                async for _ in rows:
                    pass
        finally:
            os.kill(cluster.pid("b"), signal.SIGCONT)
        assert error.outcome is Outcome.UNKNOWN
        assert "stopped" in str(error)
        with pytest.raises(OwnerLostError, match="stopped"):
            await theirs.to_here()
        # It goes on, and so do both: as two that have just met.
        async with asyncio.timeout(SOON_S):
            while await a.peer("b").call(values_owned):
                pass
        assert await a.peer("b").remote(list).to_here() == []
        assert a.counters.workers_lost == 1


@pytest.mark.parametrize("transport", ["uds", "tcp"])
async def test_a_killed_worker_is_lost_long_before_the_limit(transport: str) -> None:
    options = Options(
        liveness=LivenessOptions(heartbeat_s=20, lost_after_s=600), drain_timeout_s=0.5
    )
    cluster = processes("b", "c", transport=transport, options=options)
    async with cluster as a:
        # c dials b, as a does.  Each has an item when b is at work for it.
        theirs = a.peer("c").stream(follow, "b")
        assert await anext(theirs) == "begun"
        ours = a.peer("b").stream(begin_and_wait)
        assert await anext(ours) == "begun"
        cluster.kill("b")
        error = await lose(asyncio.ensure_future(anext(ours)))
        assert error.outcome is Outcome.UNKNOWN
        assert await anext(theirs) == "unknown"


async def begin_and_wait() -> AsyncIterator[str]:
    yield "begun"
    await asyncio.sleep(600)


async def follow(name: str) -> AsyncIterator[str]:
    """Pass on what a worker yields, and then how it was lost."""
    try:
        async for item in asyncrpc.current_worker().peer(name).stream(begin_and_wait):
            yield item
    except WorkerLostError as error:
        yield error.outcome.value


async def test_stopped_worker_blames_no_peer_afterwards() -> None:
    """The worker heard nothing while it stood still itself."""
    async with processes("b", options=OPTIONS) as a:
        link = await a.parts.link_to("b")
        time.sleep(BUSY_S)  # noqa: ASYNC251  (this loop hears nothing meanwhile)
        assert await a.peer("b").call(remote.add, 1) == 2
        assert await a.parts.link_to("b") is link  # resumed, maybe, and the same
