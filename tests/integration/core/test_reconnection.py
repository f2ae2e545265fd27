"""A connection that breaks costs time and nothing else: no call fails or runs twice.

The workers reach each other through proxies, which cut where they are told to.  With
`ASYNCRPC_CUTS=all` every place is tried; without, every few of them.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, Final

import pytest

import asyncrpc
from asyncrpc import NetworkOptions, Options, Outcome, Worker, WorkerLostError
from asyncrpc.core.links.link import Link
from asyncrpc.testing.proxy import Proxy, Way
from tests.integration.core import reconnection_load as load
from tests.integration.core.groups import LIMIT_S, until
from tests.integration.core.proxied import in_process, proxied

EVERY: Final = 1 if os.environ.get("ASYNCRPC_CUTS") == "all" else 5
SCRIPT_S: Final = 120.0  # for one script; only a failure reaches it
# Into the frame after the boundary: its header, or what follows a short one.
INSIDE_BYTES: Final = (1, 20, 39, 40, 57, 3000)
UNDER_LOAD_S: Final = 20.0 if EVERY == 1 else 4.0
OPTIONS: Final = Options(
    drain_timeout_s=1.0,
    liveness=asyncrpc.LivenessOptions(lost_after_s=20.0, heartbeat_s=5.0),
    network=NetworkOptions(bulk_lanes=0),
    membership="static",
)

Pair = tuple[Worker, Worker, Proxy]


def link_between(a: Worker, b: Worker) -> tuple[Link | None, Link | None]:
    return a.parts.directory.find(b.name).link, b.parts.directory.find(a.name).link


class Cuts:
    """Plays the script with a cut at one place after the other."""

    def __init__(self, a: Worker, b: Worker, proxy: Proxy) -> None:
        self.a, self.b, self.proxy = a, b, proxy
        self.happened = 0
        self.tried = 0

    async def measure(self) -> dict[Way, int]:
        """Return how many frames the script sends each way, uncut."""
        await self.play()
        before = dict(self.proxy.frames)
        await self.play()
        return {way: self.proxy.frames[way] - before[way] for way in Way}

    async def play(self) -> None:
        await asyncio.wait_for(load.play(self.a, self.b), SCRIPT_S)

    async def play_cut(
        self, way: Way, frames: int, nbytes: int, *, reset: bool
    ) -> None:
        cut = self.proxy.cut_after(way, frames=frames, nbytes=nbytes, reset=reset)
        place = f"{frames} frames and {nbytes} bytes {way.value}, reset={reset}"
        before = link_between(self.a, self.b)
        try:
            await self.play()
        except BaseException as error:
            error.add_note(f"with a cut after {place}")
            raise
        self.tried += 1
        self.happened += cut.happened.is_set()
        self.proxy.spare(cut)
        if all(before) and all(now := link_between(self.a, self.b)):
            assert now == before, f"another link, after a cut after {place}"


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [0, 1])
@pytest.mark.parametrize("reset", [True, False])
async def test_cut_at_any_byte_loses_no_call(lanes: int, *, reset: bool) -> None:
    options = replace(OPTIONS, network=replace(OPTIONS.network, bulk_lanes=lanes))
    async with proxied("a", "b", options=options) as (workers, proxies):
        cuts = Cuts(workers["a"], workers["b"], proxies["b"])
        counts = await cuts.measure()
        places = [
            (way, frames, inside)
            for way, count in counts.items()
            for frames in range(count)
            for inside in (0, INSIDE_BYTES[frames % len(INSIDE_BYTES)])
        ]
        for way, frames, inside in places[random.randrange(EVERY) :: EVERY]:
            await cuts.play_cut(way, frames, inside, reset=reset)
        # Acknowledgements make the number of frames differ a little.
        assert cuts.happened > 0.8 * cuts.tried


async def test_cut_inside_a_resuming_handshake_loses_no_call() -> None:
    async with proxied("a", "b", options=OPTIONS) as (workers, proxies):
        cuts = Cuts(workers["a"], workers["b"], proxies["b"])
        await cuts.play()
        for way in Way:
            for nbytes in (0, 1, 39, 40, 41, 71, 72, 90, 112, 130):
                again = proxies["b"].cut_after(way, nbytes=nbytes)
                proxies["b"].cut()
                await cuts.play()
                proxies["b"].spare(again)


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("way", Way)
async def test_dial_cut_in_handshake_loses_no_call(way: Way, *, reset: bool) -> None:
    for nbytes in (0, 1, 39, 40, 41, 71, 72, 90, 112, 130):
        async with proxied("a", "b", "c", options=OPTIONS) as (workers, proxies):
            cut = proxies["c"].cut_after(way, nbytes=nbytes, reset=reset)
            # To `c` there is no connection yet.
            assert await workers["b"].peer("c").call(max, 1, 2) == 2
            assert cut.happened.is_set()


@pytest.mark.parametrize("lanes", [0, 1])
async def test_frequent_cuts_under_load_lose_no_call(lanes: int) -> None:
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    options = replace(OPTIONS, network=replace(OPTIONS.network, bulk_lanes=lanes))
    async with proxied("a", "b", options=options) as (workers, proxies):
        a, b = workers["a"], workers["b"]
        loop = asyncio.get_running_loop()
        until_s = loop.time() + UNDER_LOAD_S
        played = 0

        async def go_on() -> None:
            nonlocal played
            while loop.time() < until_s:
                await load.play(a, b)
                played += 1

        try:
            async with (
                asyncio.timeout(UNDER_LOAD_S + SCRIPT_S),
                asyncio.TaskGroup() as go,
            ):
                for _ in range(4):
                    go.create_task(go_on())
                while loop.time() < until_s:
                    await asyncio.sleep(rng.expovariate(6))
                    way, nbytes = rng.choice(list(Way)), [0, 7, 5000, 900_000]
                    cut = proxies["b"].cut_after(way, nbytes=rng.choice(nbytes))
                    await asyncio.sleep(rng.uniform(0.0, 0.1))
                    proxies["b"].spare(cut)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        assert played
        assert proxies["b"].connections > 3


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    options = replace(
        OPTIONS,
        liveness=replace(OPTIONS.liveness, lost_after_s=1.0, heartbeat_s=0.3),
        network=replace(OPTIONS.network, connect_timeout_s=2.0),
    )
    async with proxied("a", "b", options=options) as (workers, proxies):
        a, b = workers["a"], workers["b"]
        await load.play(a, b)
        yield a, b, proxies["b"]


async def test_silent_peer_is_lost_and_can_return(pair: Pair) -> None:
    a, b, proxy = pair
    number, unsent = load.Calls().new(), load.Calls().new()
    gone = asyncio.Event()
    load.cancelled[number] = gone
    call = a.parts.start_call("b", load.wait_for_ever, (number,))
    async with asyncio.timeout(LIMIT_S):
        while not load.ran[number]:
            await a.peer("b").call(load.run, 0)
        proxy.partition()
        with pytest.raises(WorkerLostError) as caught:
            await call
        assert caught.value.outcome is Outcome.UNKNOWN
        await gone.wait()  # b has given up a, too, and cancelled what a had called
        with pytest.raises(WorkerLostError) as caught:
            await a.peer("b").call(load.run, unsent)
        assert caught.value.outcome is Outcome.NOT_EXECUTED
        proxy.heal()
        await load.play(a, b)
    assert (load.ran[number], load.ran[unsent]) == (1, 0)


async def test_short_partition_loses_no_call(pair: Pair) -> None:
    a, b, proxy = pair
    before: Any = link_between(a, b)
    proxy.partition()
    played = asyncio.create_task(load.play(a, b))
    await until(lambda: len(before[0].pending) > 0)
    proxy.heal()
    await asyncio.wait_for(played, LIMIT_S)
    assert link_between(a, b) == before


async def test_connection_survives_a_refusal_for_a_while(pair: Pair) -> None:
    """The port refuses while the process runs: the network may be at fault."""
    a, b, proxy = pair
    before: Any = link_between(a, b)
    await proxy.refuse()
    proxy.cut()
    played = asyncio.create_task(load.play(a, b))
    await until(lambda: before[0].connection.is_broken)
    await proxy.accept()
    await asyncio.wait_for(played, LIMIT_S)
    assert link_between(a, b) == before


async def test_killed_peer_behind_a_live_proxy_is_lost() -> None:
    options = replace(
        OPTIONS, liveness=replace(OPTIONS.liveness, lost_after_s=4.0, heartbeat_s=1.0)
    )
    async with in_process("b", options=options) as (a, process, _proxy):
        assert await a.peer("b").call(load.run, 5) == 5
        call = a.parts.start_call("b", asyncio.sleep, (3600.0,))
        await a.peer("b").call(load.run, 6)
        process.send_signal(signal.SIGKILL)
        with pytest.raises(WorkerLostError) as caught:
            await asyncio.wait_for(call, 4 * options.liveness.lost_after_s)
        assert caught.value.outcome is Outcome.UNKNOWN
