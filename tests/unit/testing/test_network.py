"""Simulated faults: what a program sees, and that a seed repeats it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

import pytest

from asyncrpc.core.transport.address import Address
from asyncrpc.errors import ConnectError, ConnectionLostError, TransportError
from asyncrpc.testing.conformance import Acceptor, Pair, Recorder
from asyncrpc.testing.loop import SimLoop
from asyncrpc.testing.network import (
    BROKEN_AFTER_S,
    CONNECT_TIMEOUT_S,
    DETECT_S,
    Network,
)

loops = {"sim": SimLoop}  # of the coroutine tests here

T = TypeVar("T")
PS = Address("mem", "ps")


def run(main: Coroutine[object, object, T]) -> T:
    with asyncio.Runner(loop_factory=SimLoop) as runner:
        return runner.run(main)


async def connected(network: Network) -> Pair:
    acceptor, near = Acceptor(), Recorder()
    await network.connector("ps").listen(PS, acceptor)
    await network.connector("a").connect(PS, near)
    await acceptor.connected(1)
    return Pair(near, acceptor.accepted[0])


def now_s() -> float:
    return asyncio.get_running_loop().time()


async def chatter(seed: int) -> list[tuple[float, str]]:
    network = Network(seed)
    network.between("a", "ps").lose(0.1)
    pair = await connected(network)
    for index in range(100):
        pair.near.transport.send([b"x" * index])
        pair.far.transport.send([b"y"])
    await pair.far.until_received(4950)
    pair.near.transport.close()
    await pair.near.until_lost()
    return list(network.trace)


def test_same_seed_gives_the_same_trace() -> None:
    first, again, other = run(chatter(1)), run(chatter(1)), run(chatter(2))
    assert len(first) > 50
    assert first == again
    assert first != other


def test_delay_is_applied() -> None:
    async def main(mean_s: float) -> float:
        network = Network(seed=1)
        pair = await connected(network)
        network.between("ps", "a").delay(mean_s)
        start_s = now_s()
        for size in range(1, 31):
            pair.near.transport.send([b"x"])
            await pair.far.until_received(size)
        return now_s() - start_s

    assert run(main(0.1)) == pytest.approx(3, rel=0.5)
    assert run(main(0.0)) == 0


async def test_short_partition_delays_and_loses_nothing() -> None:
    network = Network(seed=1)
    pair = await connected(network)
    link = network.between("a", "ps")
    link.partition()
    pair.near.transport.send([b"held"])
    asyncio.get_running_loop().call_later(5, link.heal)
    start_s = now_s()
    await pair.far.until_received(4)
    assert now_s() - start_s == pytest.approx(5, abs=0.1)
    assert pair.far.received == b"held"


async def test_long_partition_breaks_both_ends() -> None:
    network = Network(seed=1)
    pair = await connected(network)
    network.between("a", "ps").partition()
    start_s = now_s()
    for recorder in (pair.near, pair.far):
        await recorder.until_lost(limit_s=2 * BROKEN_AFTER_S)
    assert now_s() - start_s == pytest.approx(BROKEN_AFTER_S)
    assert isinstance(pair.near.error, ConnectionLostError)
    assert isinstance(pair.far.error, ConnectionLostError)


async def test_connecting_through_a_partition_waits_for_it_to_heal() -> None:
    network = Network(seed=1)
    await network.connector("ps").listen(PS, Recorder)
    network.between("a", "ps").partition()
    asyncio.get_running_loop().call_later(20, network.between("a", "ps").heal)
    await network.connector("a").connect(PS, Recorder())
    assert now_s() == pytest.approx(20, abs=0.1)


async def test_connecting_through_a_partition_gives_up_in_the_end() -> None:
    network = Network(seed=1)
    await network.connector("ps").listen(PS, Recorder)
    network.between("a", "ps").partition()
    with pytest.raises(ConnectError, match="no answer in 127 s"):
        await network.connector("a").connect(PS, Recorder())
    assert now_s() == pytest.approx(CONNECT_TIMEOUT_S)


async def test_clog_holds_everything_back_for_its_time() -> None:
    network = Network(seed=1)
    pair = await connected(network)
    network.between("a", "ps").clog(3)
    start_s = now_s()
    pair.far.transport.send([b"late"])
    await pair.near.until_received(4)
    assert now_s() - start_s == pytest.approx(3, abs=0.1)


async def test_dropped_connections_are_lost_at_both_ends() -> None:
    network = Network(seed=1)
    pair = await connected(network)
    network.between("a", "ps").drop_connections()
    await pair.near.until_lost()
    await pair.far.until_lost()
    assert (pair.near.lost, pair.far.lost) == (1, 1)
    assert isinstance(pair.near.error, ConnectionLostError)


async def test_repeated_loss_breaks_the_connection() -> None:
    network = Network(seed=1)
    pair = await connected(network)
    network.between("a", "ps").lose(1)
    pair.near.transport.send([b"never"])
    await pair.near.until_lost()
    assert not pair.far.received


async def test_crash_is_noticed_by_the_other_side_only() -> None:
    network = Network(seed=1)
    pair = await connected(network)
    start_s = now_s()
    network.crash("ps")
    await pair.near.until_lost()
    assert now_s() - start_s == pytest.approx(DETECT_S)
    assert "'ps' has crashed" in str(pair.near.error)
    assert pair.far.events == ["connection_made"]
    with pytest.raises(ConnectError, match="no such listener"):
        await network.connector("a").connect(PS, Recorder())
    with pytest.raises(TransportError, match="crashed"):
        await network.connector("ps").listen(PS, Recorder)
    network.restart("ps")
    await network.connector("ps").listen(PS, Recorder)
    await network.connector("a").connect(PS, Recorder())


async def test_silent_crash_leaves_a_half_open_connection() -> None:
    network = Network(seed=1)
    pair = await connected(network)
    network.crash("ps", silent=True)
    await asyncio.sleep(1000)
    assert not pair.near.lost  # nothing was sent, so nothing was missed
    pair.near.transport.send([b"hello?"])
    await asyncio.sleep(BROKEN_AFTER_S / 2)
    assert pair.near.transport.queued_bytes == 6
    await asyncio.sleep(BROKEN_AFTER_S)
    assert isinstance(pair.near.error, ConnectionLostError)
    assert not pair.far.received
    with pytest.raises(ConnectError, match="no answer"):
        await network.connector("a").connect(PS, Recorder())


async def test_stopped_reader_ends_a_close_after_the_linger() -> None:
    pair = await connected(Network(seed=1))
    pair.far.transport.pause_reading()
    pair.near.transport.send([b"unread"])
    start_s = now_s()
    pair.near.transport.close()
    await pair.near.until_lost()
    assert now_s() - start_s == pytest.approx(5)
    assert "6 bytes unsent" in str(pair.near.error)
