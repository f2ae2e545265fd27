"""What a worker does for peers that are idle: counted, in virtual time.

And that calls of one peer take no more steps because there are others.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final

import pytest

from asyncrpc import LivenessOptions, Options, Worker
from asyncrpc.core.links.connection import Connection
from asyncrpc.core.links.liveness import NEWS_BYTES
from asyncrpc.core.wire.reader import RESTING_BYTES
from asyncrpc.testing import Cluster
from asyncrpc.testing.loop import SimLoop
from asyncrpc.testing.network import Network
from tests.simulated import play
from tests.simulation.seeds import simulated

HEARTBEAT_S: Final = Options().liveness.heartbeat_s
SETTLED_S: Final = 10 * HEARTBEAT_S
REST_S: Final = 100 * HEARTBEAT_S
CALLS: Final = 11  # to each peer, at once: an ACK is due after every second one


def give_back(value: bytes) -> bytes:
    return value


async def call_all(worker: Worker, others: list[Worker], nbytes: int) -> None:
    """Let each of the others make calls of one, and rest."""
    await asyncio.gather(
        *(
            other.peer(worker.name).call(give_back, b"x" * nbytes)
            for other in others
            for _ in range(CALLS)
        )
    )
    await asyncio.sleep(SETTLED_S)


def links_of(*workers: Worker) -> int:
    return sum(len(tuple(worker.parts.directory.links)) for worker in workers)


def timers(network: Network) -> int:
    loop = network.loop
    assert isinstance(loop, SimLoop)
    scheduled: list[asyncio.TimerHandle] = loop._scheduled  # type: ignore[attr-defined]  # noqa: SLF001
    return sum(not timer.cancelled() for timer in scheduled)


@pytest.mark.parametrize("peers", [8, 32])
@simulated([1])
async def test_idle_peer_costs_a_message_each_way_in_a_heartbeat(
    network: Network, peers: int
) -> None:
    names = [f"w{number}" for number in range(peers + 1)]
    async with Cluster(names=names, network=network) as workers:
        await call_all(workers[0], workers[1:], 1)
        links = links_of(*workers) / 2  # both ends
        assert links >= peers
        before = network.sent
        await asyncio.sleep(REST_S)
        # Comparing what members know costs a message now and then.
        sent = (network.sent - before) / (REST_S / HEARTBEAT_S)
        assert sent < 2 * links + 0.5 * len(workers)


@simulated([1])
async def test_idle_peer_costs_no_timer(network: Network) -> None:
    names = [f"w{number}" for number in range(33)]
    async with Cluster(names=names, network=network) as workers:
        await asyncio.sleep(SETTLED_S)
        links, before = links_of(*workers), timers(network)
        await call_all(workers[0], workers[1:], 1)
        assert links_of(*workers) >= links + 50  # two have had one before
        assert timers(network) <= before


@simulated([1])
async def test_idle_peer_keeps_little_memory(network: Network) -> None:
    """Of what came no more than a page; of what was sent no more than is unknown."""
    async with Cluster(4, network=network) as workers:
        await call_all(workers[0], workers[1:], 20_000)
        for link in workers[0].parts.directory.links:
            connection = link.connection
            assert isinstance(connection, Connection)
            frames = connection.incoming.frames
            assert not any(frames._view[RESTING_BYTES:])  # noqa: SLF001
            kept = connection.resumption.unacknowledged
            assert kept.start > CALLS * 20_000
            assert kept.nbytes < NEWS_BYTES


# --- calls beside idle peers ---------------------------------------------------------


@dataclass
class Steps:
    """How many functions of the package were entered."""

    count: int = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count from here on."""
        before = sys.getprofile()
        sys.setprofile(self._on_event)
        try:
            yield
        finally:
            sys.setprofile(before)

    def _on_event(self, frame: FrameType, event: str, _argument: Any) -> None:
        name = frame.f_globals.get("__name__", "")
        if event == "call" and name.startswith("asyncrpc.core"):
            self.count += 1


def steps_of_calls(peers: int) -> int:
    """Return how many steps calls of one peer take while the others are connected."""
    steps = Steps()
    # None of the idle ones has anything to say meanwhile.
    quiet = LivenessOptions(heartbeat_s=1e4, lost_after_s=1e5)

    async def scenario(network: Network) -> None:
        names = [f"w{number}" for number in range(peers + 1)]
        options = Options(liveness=quiet)
        async with Cluster(names=names, network=network, options=options) as workers:
            await call_all(workers[0], workers[1:], 1)
            caller = workers[1].peer("w0")
            with steps.counted():
                for _ in range(CALLS):
                    await caller.call(give_back, b"")

    play(scenario, 1)
    return steps.count


def test_call_takes_as_many_steps_beside_32_idle_peers_as_beside_2() -> None:
    few = steps_of_calls(2)
    assert few > CALLS
    assert steps_of_calls(32) == pytest.approx(few, abs=CALLS)
