"""Lanes find the connection that they belong to, and no other."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, Final

import pytest

from asyncrpc.core.wire.frames import FrameKind, Hello
from asyncrpc.errors import ConnectError
from asyncrpc.testing.loop import SimLoop
from asyncrpc.testing.network import Network
from tests.unit.core.links.directories import (
    TIMES,
    Host,
    closed,
    hosts,
    until,
)

loops = {"sim": SimLoop}  # of the coroutine tests here

LARGE: Final = 1 << 20
LANES: Final = replace(TIMES, bulk_lanes=2)


async def linked() -> tuple[Host, Host]:
    a, b = await hosts(Network(1), "a", "b", times=LANES)
    await a.directory.open_link("b")
    await until(lambda: b.directory.link_to("a") is not None)
    return a, b


def send_large(host: Host, to: str, number: int) -> None:
    buffers = (memoryview(bytes(LARGE)),)
    host.link_to(to).connection.send(FrameKind.REQUEST, number, buffers=buffers)


def lanes_of(host: Host, to: str) -> list[Any]:
    connection_lanes = host.link_to(to).connection.lanes
    assert connection_lanes is not None
    return [lane.connection for lane in connection_lanes.lanes]


def lanes(host: Host, to: str) -> int:
    return len(lanes_of(host, to))


@pytest.mark.parametrize("dialer", [True, False])
async def test_large_payload_opens_lanes_from_either_side(*, dialer: bool) -> None:
    a, b = await linked()
    assert lanes(a, "b") == 0
    if dialer:
        send_large(a, "b", 7)
        await until(lambda: b.arrived("a") == [7])
    else:
        send_large(b, "a", 7)
        await until(lambda: a.arrived("b") == [7])
    await until(lambda: lanes(a, "b") == lanes(b, "a") == 2)
    await closed(a, b)


async def test_lane_of_an_unknown_connection_is_refused() -> None:
    a, b = await linked()
    control = a.link_to("b").connection
    member = a.directory.find("b").member
    b.link_to("a").connection.peer = None  # as of another peer
    with pytest.raises(ConnectError, match="refused a lane: no such connection"):
        await a.directory.lane_dialer.dial(member, control)
    assert lanes(a, "b") == 0
    await closed(a, b)


async def test_number_of_lanes_is_limited() -> None:
    a, b = await linked()
    control = a.link_to("b").connection
    member = a.directory.find("b").member
    for _ in range(16):
        await a.directory.lane_dialer.dial(member, control)
    with pytest.raises(ConnectError, match="too many lanes"):
        await a.directory.lane_dialer.dial(member, control)
    await closed(a, b)


async def test_broken_lane_is_resumed() -> None:
    network = Network(1)
    a, b = await hosts(network, "a", "b", times=LANES)
    await a.directory.open_link("b")
    await until(lambda: b.directory.link_to("a") is not None)
    send_large(a, "b", 1)
    await until(lambda: b.arrived("a") == [1])
    await until(lambda: lanes(a, "b") == lanes(b, "a") == 2)
    network.between("a", "b").drop_connections()
    await until(lambda: a.directory.link_to("b") is not None)
    await until(lambda: a.counters.connections_resumed >= 3)
    send_large(a, "b", 2)
    await until(lambda: b.arrived("a") == [1, 2])
    assert a.lost == b.lost == []
    await closed(a, b)


@pytest.mark.parametrize("seed", range(10))
async def test_lane_broken_only_at_the_accepting_side_is_resumed(seed: int) -> None:
    """Its dialer writes nothing to it, and so has no sign of its end."""
    network = Network(seed)
    a, b = await hosts(network, "a", "b", times=LANES)
    await a.directory.open_link("b")
    await until(lambda: b.directory.link_to("a") is not None)
    send_large(a, "b", 1)
    await until(lambda: b.arrived("a") == [1])
    await until(lambda: lanes(a, "b") == lanes(b, "a") == 2)
    network.between("a", "b").partition()
    for lane in lanes_of(b, "a"):
        lane.resumption.break_off("only here")
    await asyncio.sleep(0.1)
    network.between("a", "b").heal()
    await until(lambda: b.counters.connections_resumed >= 2)
    await asyncio.sleep(2 * TIMES.lost_after_s)
    assert b.counters.connections_resumed == 2  # and it stays
    send_large(b, "a", 2)
    await until(lambda: a.arrived("b") == [2])
    assert a.lost == b.lost == []
    await closed(a, b)


async def test_lane_resumed_since_is_left_alone() -> None:
    a, b = await hosts(Network(1), "a", "b", times=LANES)
    await a.directory.open_link("b")
    await until(lambda: b.directory.link_to("a") is not None)
    send_large(a, "b", 1)
    await until(lambda: lanes(a, "b") == lanes(b, "a") == 2)
    lane = lanes_of(b, "a")[0]
    lane.resumption.break_off("at both ends")
    await until(lambda: b.counters.connections_resumed >= 1)
    await until(lambda: a.counters.connections_resumed >= 1)
    counted = a.counters.connections_resumed
    b.link_to("a").connection.send(FrameKind.LANE_BROKEN, lane.token, aux=0)
    b.link_to("a").send(3)
    await until(lambda: 3 in a.arrived("b"))
    assert a.counters.connections_resumed == counted
    assert not lane.is_broken
    await closed(a, b)


@pytest.mark.parametrize("seed", range(10))
async def test_lane_broken_before_its_dialer_holds_it_is_dropped(seed: int) -> None:
    """Its reset overtakes the answer to its dialer, or does not."""
    a, b = await hosts(Network(seed), "a", "b", times=LANES)
    await a.directory.open_link("b")
    await until(lambda: b.directory.link_to("a") is not None)
    accepted = cut_when_accepted(b)
    send_large(b, "a", 1)
    await until(lambda: a.arrived("b") == [1])
    send_large(a, "b", 2)
    await until(lambda: b.arrived("a") == [2])
    await asyncio.sleep(3 * TIMES.lost_after_s)
    send_large(b, "a", 3)
    await until(lambda: a.arrived("b") == [1, 3])
    assert len(accepted) == 2
    assert lanes(a, "b") == lanes(b, "a")
    assert not any(lane.is_broken for lane in lanes_of(b, "a"))
    assert a.lost == b.lost == []
    await closed(a, b)
    assert all(lane.ended.done() for lane in accepted)


def cut_when_accepted(host: Host) -> list[Any]:
    """Break each lane as soon as `host` has accepted it; return these."""
    accepted: list[Any] = []
    dialer: Any = host.directory.lane_dialer
    on_offer = dialer.on_offer

    def accept(connection: Any, hello: Hello) -> None:
        on_offer(connection, hello)
        accepted.append(connection)
        connection.resumption.break_off("cut when accepted")

    dialer.on_offer = accept
    return accepted
