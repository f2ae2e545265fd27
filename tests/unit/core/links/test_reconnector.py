"""A link outlives its connections, until its peer is known or believed to be lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncrpc.core.links.machine.detector import Evidence
from asyncrpc.core.links.machine.reconnect import NO_SUCH
from asyncrpc.testing.loop import SimLoop
from asyncrpc.testing.network import Network
from tests.unit.core.links.directories import (
    TIMES,
    Host,
    closed,
    hosts,
    now_s,
    until,
)

loops = {"sim": SimLoop}  # of the coroutine tests here


def knows(host: Host, evidence: Evidence) -> None:
    """Let a host find out this much of every peer's process."""

    async def find_out(_connection: object) -> Evidence:
        return evidence

    inner: Any = host.directory
    inner._liveness.evidence = find_out  # noqa: SLF001  (nobody else knows)


async def linked(network: Network, *, evidence: Evidence) -> tuple[Host, Host]:
    a, b = await hosts(network, "a", "b")
    for host in (a, b):
        knows(host, evidence)
    await a.directory.open_link("b")
    await until(lambda: b.directory.link_to("a") is not None)
    return a, b


@pytest.mark.parametrize("evidence", [Evidence.TICKING, Evidence.UNKNOWN])
@pytest.mark.parametrize("seed", range(10))
async def test_messages_around_a_break_arrive_once_and_in_order(
    seed: int, evidence: Evidence
) -> None:
    network = Network(seed)
    a, b = await linked(network, evidence=evidence)
    ends = a.link_to("b"), b.link_to("a")
    for round_ in range(4):
        for link in ends:
            link.send(4 * round_)
            link.send(4 * round_ + 1)
        network.between("a", "b").drop_connections()
        await asyncio.sleep(0)
        for link in ends:
            link.send(4 * round_ + 2)
        await asyncio.sleep(0.003 * round_)
        for link in ends:
            link.send(4 * round_ + 3)
        count = 4 * round_ + 4
        await until(lambda: all(len(end.arrived) >= count for end in ends))  # noqa: B023  (it is awaited here)
    assert [end.arrived for end in ends] == [list(range(16))] * 2
    assert (a.link_to("b"), b.link_to("a")) == ends
    assert a.lost == b.lost == []
    assert min(host.counters.connections_resumed for host in (a, b)) >= 4
    await closed(a, b)


async def test_calls_wait_for_a_broken_connection() -> None:
    network = Network(1)
    a, b = await linked(network, evidence=Evidence.TICKING)
    link = a.link_to("b")
    network.between("a", "b").partition()
    network.between("a", "b").drop_connections()
    await until(lambda: a.directory.link_to("b") is None)
    waiting = a.start_task(a.directory.open_link("b"))
    await asyncio.sleep(1.0)
    assert not waiting.done()
    network.between("a", "b").heal()
    assert await waiting is link
    await closed(a, b)


async def test_ended_process_is_lost_at_once() -> None:
    network = Network(1)
    a, b = await linked(network, evidence=Evidence.GONE)
    links = a.link_to("b"), b.link_to("a")
    network.between("a", "b").partition()
    network.between("a", "b").drop_connections()
    began_s = now_s()
    await until(lambda: all(link.is_lost for link in links))
    assert now_s() - began_s < 0.1
    assert all("its process has ended" in link.lost_because for link in links)
    assert (a.lost, b.lost) == (["b"], ["a"])
    await closed(a, b)


async def test_peer_that_stopped_listening_is_lost_without_evidence() -> None:
    network = Network(1)
    a, b = await linked(network, evidence=Evidence.UNKNOWN)
    link = a.link_to("b")
    await b.listen_no_more()
    network.between("a", "b").drop_connections()
    await until(lambda: link.is_lost)
    assert "no process listens there any more" in link.lost_because
    await closed(a, b)


@pytest.mark.parametrize("evidence", [Evidence.TICKING, Evidence.STOPPED])
async def test_peer_that_stopped_listening_is_awaited_if_its_process_lives(
    evidence: Evidence,
) -> None:
    network = Network(1)
    a, b = await linked(network, evidence=evidence)
    link = a.link_to("b")
    await b.listen_no_more()
    network.between("a", "b").drop_connections()
    await asyncio.sleep(1.0)
    assert not link.is_lost
    await b.listen()
    await until(lambda: a.directory.link_to("b") is link)
    await closed(a, b)


async def test_long_partition_ends_the_link_at_both_ends() -> None:
    network = Network(1)
    a, b = await linked(network, evidence=Evidence.UNREACHABLE)
    links = a.link_to("b"), b.link_to("a")
    network.between("a", "b").partition()
    network.between("a", "b").drop_connections()
    began_s = now_s()
    await until(lambda: all(link.is_lost for link in links))
    most_s = TIMES.lost_after_s + 2 * TIMES.heartbeat_s
    assert TIMES.lost_after_s <= now_s() - began_s <= most_s
    network.between("a", "b").heal()
    again = await a.directory.open_link("b")
    assert again not in links
    assert a.back == ["b"]
    await closed(a, b)


async def test_link_given_up_by_a_peer_is_lost_at_the_other_end() -> None:
    network = Network(1)
    a, b = await linked(network, evidence=Evidence.TICKING)
    links = a.link_to("b"), b.link_to("a")
    network.between("a", "b").partition()
    network.between("a", "b").drop_connections()
    await until(lambda: links[1].connection.is_broken)
    knows(b, Evidence.GONE)
    await until(lambda: links[1].is_lost)
    network.between("a", "b").heal()
    await until(lambda: links[0].is_lost)
    assert NO_SUCH in links[0].lost_because
    await closed(a, b)


async def test_restarted_worker_at_the_address_is_not_resumed() -> None:
    network = Network(1)
    a, b = await linked(network, evidence=Evidence.TICKING)
    link = a.link_to("b")
    await b.listen_no_more()
    new = Host(network, "b", 99)
    await new.listen()
    network.between("a", "b").drop_connections()
    await until(lambda: link.is_lost)
    assert a.lost == ["b"]
    await closed(a, b, new)


async def test_silent_connection_is_replaced_before_its_break_is_known() -> None:
    """What is sent goes nowhere; nothing tells of it but the silence."""
    a, b = await linked(Network(1), evidence=Evidence.TICKING)
    link, before = a.link_to("b"), a.counters.connections_resumed
    a.directory.reconnector.try_another_way(link.connection)
    a.directory.reconnector.try_another_way(link.connection)  # under way
    await until(lambda: a.counters.connections_resumed == before + 1)
    link.send(5)
    await until(lambda: b.arrived("a") == [5])
    assert a.directory.link_to("b") is link
    await closed(a, b)


async def test_accepting_side_does_not_dial() -> None:
    network = Network(1)
    a, b = await linked(network, evidence=Evidence.TICKING)
    sent = network.sent
    b.directory.reconnector.try_another_way(b.link_to("a").connection)
    await asyncio.sleep(0.5)
    assert network.sent == sent
    await closed(a, b)


async def test_worker_in_shutdown_resumes_nothing() -> None:
    network = Network(1)
    a, b = await linked(network, evidence=Evidence.TICKING)
    link = a.link_to("b")
    b.directory.connections.is_closing = True
    network.between("a", "b").drop_connections()
    await until(lambda: link.is_lost)
    assert NO_SUCH in link.lost_because
    assert b.lost == ["a"]
    await closed(a, b)
