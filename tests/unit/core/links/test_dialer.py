"""A dial ends with one link that both sides use, or says why there is none."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from asyncrpc.core.links.entry import FirstMessage
from asyncrpc.core.links.machine.dialing import PAUSES_AFTER_BREAK_S
from asyncrpc.core.links.routes import RACE_SHARE
from asyncrpc.errors import ClosedError, Outcome, WorkerLostError
from asyncrpc.testing.loop import SimLoop
from asyncrpc.testing.network import Network
from tests.unit.core.links.directories import (
    TIMES,
    Host,
    closed,
    cut_at_once,
    hosts,
    now_s,
    until,
)

loops = {"sim": SimLoop}  # of the coroutine tests here


async def test_link_is_made_once_for_concurrent_requests() -> None:
    a, b = await hosts(Network(1), "a", "b")
    links = await asyncio.gather(*(a.directory.open_link("b") for _ in range(9)))
    assert len(set(links)) == 1
    assert await a.directory.open_link("b") is links[0]
    links[0].send(7)
    await until(lambda: b.arrived("a") == [7])
    await closed(a, b)


@pytest.mark.parametrize("seed", range(30))
async def test_mutual_dials_leave_one_link(seed: int) -> None:
    a, b = await hosts(Network(seed), "a", "b")
    await asyncio.gather(a.directory.open_link("b"), b.directory.open_link("a"))
    a.link_to("b").send(1)
    b.link_to("a").send(2)
    await until(lambda: a.arrived("b") == [2])
    await until(lambda: b.arrived("a") == [1])
    assert len(a.directory.links) == len(b.directory.links) == 1
    assert a.lost == b.lost == []
    await closed(a, b)


@pytest.mark.parametrize("times", range(1, len(PAUSES_AFTER_BREAK_S) + 1))
async def test_connection_broken_in_its_handshake_is_dialed_again(times: int) -> None:
    a, b = await hosts(Network(1), "a", "b")
    began_s = now_s()
    with cut_at_once(a, times) as cut:
        await a.directory.open_link("b")
    assert len(cut) == times
    assert now_s() - began_s >= sum(PAUSES_AFTER_BREAK_S[:times])
    await closed(a, b)


async def test_connection_broken_every_time_is_given_up() -> None:
    a, b = await hosts(Network(1), "a", "b")
    lost = pytest.raises(WorkerLostError, match="cut in its handshake")
    with cut_at_once(a, 100) as cut, lost as caught:
        await a.directory.open_link("b")
    assert len(cut) == len(PAUSES_AFTER_BREAK_S) + 1
    assert caught.value.outcome is Outcome.NOT_EXECUTED
    await closed(a, b)


async def test_unreachable_peer_is_lost_at_once() -> None:
    a, b = await hosts(Network(1), "a", "b")
    await b.listen_no_more()
    with pytest.raises(WorkerLostError, match=r"'b'.*cannot be reached"):
        await a.directory.open_link("b")
    assert now_s() < 1.0
    await closed(a, b)


async def test_silent_peer_is_lost_after_the_time_for_a_dial() -> None:
    network = Network(1)
    a, b = await hosts(network, "a", "b")
    network.between("a", "b").partition()
    with pytest.raises(WorkerLostError, match=r"silent: no answer in 1\.6 s"):
        await a.directory.open_link("b")
    assert now_s() == pytest.approx(RACE_SHARE * TIMES.connect_timeout_s)
    await closed(a, b)


async def test_moved_peer_is_dialed_at_its_new_address() -> None:
    a, b = await hosts(Network(1), "a", "b")
    a.directory.add([replace(b.member, addresses=("mem://elsewhere",))])
    a.moved_to["b"] = b.member
    link = await a.directory.open_link("b")
    assert link.peer == b.id
    await closed(a, b)


async def test_another_worker_at_the_address_is_refused() -> None:
    a, b, c = await hosts(Network(1), "a", "b", "c")
    a.directory.add([replace(b.member, addresses=("mem://c",))])
    with pytest.raises(WorkerLostError, match="this is worker 'c', not 'b'"):
        await a.directory.open_link("b")
    assert a.directory.links == c.directory.links == []
    await closed(a, b, c)


async def test_refusal_reason_of_the_peer_is_reported() -> None:
    a, b = await hosts(Network(1), "a", "b")
    b.refuses["a"] = "it is not of this group"
    with pytest.raises(WorkerLostError, match="refused: it is not of this group"):
        await a.directory.open_link("b")
    await closed(a, b)


async def test_cancelled_request_leaves_the_dial_to_others() -> None:
    a, b = await hosts(Network(1), "a", "b")
    given_up = a.start_task(a.directory.open_link("b"))
    kept = a.start_task(a.directory.open_link("b"))
    await asyncio.sleep(0)
    given_up.cancel()
    assert (await kept).peer == b.id
    assert given_up.cancelled()
    await closed(a, b)


async def test_accepted_connection_its_dialer_never_uses_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The acceptor does not know that it is open there; it waits, then dials itself."""
    a, b = await hosts(Network(1), "a", "b")
    with monkeypatch.context() as patch:
        patch.setattr(FirstMessage, "on_message", lambda *_: None)
        await a.directory.open_link("b")
        taken = b.entry("a").machine.connection
        assert taken is not None
        opening = b.start_task(b.directory.open_link("a"))
        began_s = now_s()
        await taken.ended
    assert now_s() - began_s == pytest.approx(TIMES.connect_timeout_s)
    link = await opening
    link.send(1)
    await until(lambda: a.arrived("b") == [1])
    assert (b.lost, b.unused_lost) == ([], ["a"])
    await closed(a, b)


async def test_restarted_peer_ends_the_link_of_its_former_life() -> None:
    network = Network(1)
    a, old = await hosts(network, "a", "b")
    former = await a.directory.open_link("b")
    await old.listen_no_more()
    new = Host(network, "b", 99)
    await new.listen()
    new.directory.add([a.member])
    link = await new.directory.open_link("a")
    assert link.peer == a.id
    link.send(3)
    await until(lambda: a.arrived("b") == [3])
    assert former.lost_because == "the worker has been restarted"
    assert a.link_to("b").peer == new.id
    await closed(a, old, new)


async def test_worker_in_shutdown_dials_no_peer() -> None:
    a, b = await hosts(Network(1), "a", "b")
    await closed(a)
    with pytest.raises(ClosedError, match="'a' is shut down"):
        await a.directory.open_link("b")
    with pytest.raises(WorkerLostError):
        await b.directory.open_link("a")
    await closed(b)


async def test_worker_may_call_itself() -> None:
    (a,) = await hosts(Network(1), "a")
    link = await a.directory.open_link("a")
    link.send(1)
    await until(lambda: any(link.arrived for link in a.directory.links))
    assert len(a.directory.links) == 2
    await closed(a)
    assert a.lost == []
