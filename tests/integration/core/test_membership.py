"""Workers join, leave, die and come back while the others run."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import asyncrpc
from asyncrpc import MemberChange, MemberChanges, UsageError, Worker, WorkerInfo
from asyncrpc.core.membership.changes import CHANGES_MAX
from asyncrpc.errors import NotStartedError, RendezvousTimeoutError, UnknownWorkerError
from asyncrpc.testing import Cluster
from tests.integration.core import remote
from tests.integration.core.conftest import Trio
from tests.integration.core.groups import LIMIT_S, logged, started, until
from tests.ports import free_port

OPTIONS = asyncrpc.Options(
    drain_timeout_s=1.0,
    rendezvous_timeout_s=5.0,
    liveness=asyncrpc.LivenessOptions(heartbeat_s=0.2, lost_after_s=1.0),
)
PATIENT = asyncrpc.LivenessOptions(heartbeat_s=60.0, lost_after_s=3600.0)


@pytest.fixture
async def quick() -> AsyncIterator[Trio]:
    async with Cluster(3, network="uds", options=OPTIONS) as (a, b, c):
        yield a, b, c


@pytest.fixture
async def patient() -> AsyncIterator[Trio]:
    """Workers that nobody takes for lost, however slow the machine is."""
    options = replace(OPTIONS, liveness=PATIENT)
    async with Cluster(3, network="uds", options=options) as (a, b, c):
        yield a, b, c


def joining(
    name: str,
    contact: Worker,
    rank: int | None = None,
    options: asyncrpc.Options = OPTIONS,
) -> Worker:
    """Make a worker that joins the group of `contact`, by its first address."""
    where = asyncrpc.JoinRendezvous(contact.addresses)
    secret = contact.options.secret
    listen = ("tcp://127.0.0.1:0",) if secret else None
    network = replace(options.network, listen=listen)
    options = replace(options, secret=secret, network=network)
    return Worker(name, rank=rank, rendezvous=where, options=options)


async def next_of(changes: MemberChanges) -> tuple[str, str]:
    change = await asyncio.wait_for(anext(changes), LIMIT_S)
    return change.kind.value, change.member.name


@asynccontextmanager
async def killed(worker: Worker) -> AsyncIterator[None]:
    """End a worker's connections without a word, as the death of its process does."""
    # No part of it may notice, so this goes behind its back.
    inner: Any = worker
    for listener in inner.parts.listeners:
        await listener.close()
    worker.parts.sidecar.close()  # its process is that of the test, which runs
    inner.parts.membership._is_closed = True  # noqa: SLF001
    inner.parts.membership.comparison.close()
    inner.parts.directory.connections.is_closing = True
    for connection in tuple(inner.parts.directory.connections.live):
        connection.allow_resuming(lambda *_: None)
        connection.stream.abort()
    yield
    inner.parts.membership._is_closed = False  # noqa: SLF001
    await worker.shutdown(drain_timeout_s=0.0)


# --- joining -------------------------------------------------------------------------


@pytest.mark.parametrize("wires", ["uds", "tcp"], indirect=True)
async def test_late_worker_becomes_a_member(wired: Trio) -> None:
    changes = [worker.members_changed() for worker in wired]
    async with joining("late", wired[1]) as late:
        for iterator in changes:
            assert await next_of(iterator) == ("joined", "late")
        for worker in wired:
            assert WorkerInfo("late", -1) in worker.known_members
            assert await worker.peer("late").call(remote.add, 1) == 2
            assert await late.peer(worker.rank).call(remote.add, 2) == 3
        assert late.known_members == wired[0].known_members
        assert late.rank == -1
    for iterator in changes:
        assert await next_of(iterator) == ("left", "late")
    assert WorkerInfo("late", -1) not in wired[2].known_members


async def test_joined_worker_admits_others(quick: Trio) -> None:
    a, _, _ = quick
    changes = a.members_changed()
    async with joining("d", a) as d, joining("e", d) as e, joining("f", e):
        for name in "def":
            assert await next_of(changes) == ("joined", name)
        assert [member.name for member in a.known_members] == list("defabc")


async def test_workers_may_join_at_once(quick: Trio) -> None:
    late = [
        joining(f"late{number}", quick[number % 3], rank=3 + number)
        for number in range(9)
    ]
    changes = [worker.members_changed() for worker in quick]
    async with started(*late):
        for iterator in changes:
            joined = {await next_of(iterator) for _ in late}
            assert joined == {("joined", worker.name) for worker in late}
        for worker in late:
            assert await quick[0].peer(worker.rank).call(remote.add, 1) == 2


async def test_name_of_a_live_worker_is_refused(quick: Trio) -> None:
    a, b, c = quick
    before = await a.peer("c").call(remote.add, 1)
    for contact in (a, c):
        with pytest.raises(UsageError, match=r"the name 'c' is taken by"):
            await joining("c", contact).__aenter__()
    assert await a.peer("c").call(remote.add, before) == before + 1
    assert await c.peer("b").call(remote.add, 1) == 2
    assert b.parts.directory.find("c").member.incarnation == c.incarnation


async def test_rank_of_a_live_worker_is_refused(quick: Trio) -> None:
    with pytest.raises(UsageError, match=r"rank 2, of 'c', is taken"):
        await joining("late", quick[0], rank=2).__aenter__()
    async with joining("late", quick[0], rank=3):
        assert (await quick[0].peer(3).call(remote.where))[0] == "late"


async def test_name_is_given_to_one_of_two_joining_workers(quick: Trio) -> None:
    async def attempt(contact: Worker) -> Worker | UsageError:
        try:
            return await joining("late", contact).__aenter__()
        except UsageError as error:
            return error

    first, second = await asyncio.gather(attempt(quick[0]), attempt(quick[0]))
    joined = [result for result in (first, second) if isinstance(result, Worker)]
    assert len(joined) == 1
    await joined[0].shutdown()


async def test_any_address_suffices_to_join(quick: Trio, tmp_path: Path) -> None:
    nobody = f"uds://{tmp_path}/nobody"
    where = f"join://{nobody},{quick[2].addresses[0].removeprefix('uds://')}"
    async with Worker("late", rendezvous=where, options=OPTIONS) as late:
        assert len(late.known_members) == 4


async def test_failed_join_names_the_addresses_tried(tmp_path: Path) -> None:
    where = asyncrpc.JoinRendezvous([f"uds://{tmp_path}/nobody"])
    options = replace(OPTIONS, rendezvous_timeout_s=0.3)
    with pytest.raises(RendezvousTimeoutError, match=r"within 0\.3 s") as caught:
        await Worker("late", rendezvous=where, options=options).__aenter__()
    assert caught.value.missing == (f"uds://{tmp_path}/nobody",)


async def test_join_can_be_cancelled(tmp_path: Path) -> None:
    where = asyncrpc.JoinRendezvous([f"uds://{tmp_path}/nobody"])
    start = asyncio.create_task(
        Worker("late", rendezvous=where, options=OPTIONS).__aenter__()
    )
    await asyncio.sleep(0)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start


@pytest.mark.parametrize("addresses", [[], "tcp://127.0.0.1:1", ["nonsense"]])
def test_invalid_join_addresses_are_refused(addresses: list[str]) -> None:
    with pytest.raises(UsageError):
        asyncrpc.JoinRendezvous(addresses)


# --- coming back ---------------------------------------------------------------------


async def test_dead_worker_returns_with_its_name_and_rank(quick: Trio) -> None:
    a, b, c = quick
    assert await a.peer("c").remote(remote.add, 1).to_here() == 2
    changes = b.members_changed()
    async with killed(c):
        async with joining("c", a) as again:
            received = [await next_of(changes)]
            if received == [("lost", "c")]:
                received.append(await next_of(changes))
            assert received[-1] == ("restarted", "c")
            assert again.rank == 2
            assert await b.peer(2).call(remote.add, 1) == 2
            assert await a.peer("c").call(remote.add, 1) == 2
            assert again.parts.membership.table.me.generation == 2
        assert await next_of(changes) == ("left", "c")


@pytest.mark.parametrize("kind", ["file", "tcp"])
async def test_worker_returns_by_the_meeting_point(tmp_path: Path, kind: str) -> None:
    port = free_port()

    def seat(name: str, rank: int) -> Worker:
        where = f"file://{tmp_path}/store"
        if kind == "tcp":
            where = f"tcp://127.0.0.1:{port}"
        return Worker(name, rank=rank, world_size=3, rendezvous=where, options=OPTIONS)

    a, b, c = (seat(name, rank) for rank, name in enumerate("abc"))
    async with started(a, b, c):
        changes = b.members_changed()
        for _ in range(2):  # its record there is that of its last life
            await c.peer("b").call(remote.add, 1)
            await c.shutdown()
            assert await next_of(changes) == ("left", "c")
            c = seat("c", 2)
            await c.__aenter__()
            assert await next_of(changes) == ("joined", "c")
            assert await a.peer(2).call(remote.add, 1) == 2
            assert await c.peer(0).call(remote.add, 1) == 2
        with pytest.raises(UsageError, match=r"rank 1 of this group is worker 'b'"):
            await seat("x", 1).__aenter__()
        with pytest.raises(UsageError, match="the name 'b' is taken"):
            await seat("b", 1).__aenter__()
        await c.shutdown()


async def test_only_worker_of_a_group_returns_alone(tmp_path: Path) -> None:
    where = f"file://{tmp_path}/store"
    for _ in range(2):
        async with Worker("a", rank=0, world_size=1, rendezvous=where) as a:
            assert a.known_members == [WorkerInfo("a", 0)]


async def test_worker_of_a_static_list_returns(tmp_path: Path) -> None:
    where = {name: f"uds://{tmp_path}/{name}" for name in "ab"}

    def seat(name: str) -> Worker:
        network = replace(OPTIONS.network, listen=(where[name],))
        return Worker(name, rendezvous=where, options=replace(OPTIONS, network=network))

    async with seat("a") as a:
        changes = a.members_changed()
        assert [member.name for member in a.known_members] == ["a", "b"]
        async with seat("b") as b:
            assert await b.peer("a").call(remote.add, 1) == 2
        assert await next_of(changes) == ("left", "b")
        async with seat("b") as b:
            assert await b.peer("a").call(remote.add, 1) == 2
            assert await next_of(changes) == ("joined", "b")
            assert b.parts.membership.table.me.generation == 2


async def test_duplicate_name_is_reported_to_one_worker(
    patient: Trio, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two members have taken them in at the same moment, with no word between them."""
    a, _, c = patient
    with monkeypatch.context() as patch:
        for worker in patient:
            patch.setattr(worker.parts.membership.gossip, "announce", id)
            patch.setattr(worker.parts.membership.comparison, "begin_round", list)
        first, second = joining("twin", a), joining("twin", c)
        async with started(first, second):
            for worker, twin in ((a, first), (c, second)):
                member = worker.parts.directory.find("twin").member
                assert member.incarnation == twin.incarnation
            patch.undo()
            with logged("has taken its name") as is_told:
                for worker in patient:
                    worker.parts.membership.comparison.begin_round()
                await asyncio.wait_for(is_told.wait(), LIMIT_S)
            stays = max(first, second, key=lambda twin: twin.incarnation)
            assert caplog.text.count("has taken its name") == 1
            assert await stays.peer("b").call(remote.add, 1) == 2


# --- leaving and dying ---------------------------------------------------------------


async def test_death_of_an_unconnected_worker_is_noticed(quick: Trio) -> None:
    a, b, c = quick
    changes = [a.members_changed(), b.members_changed()]
    # Until its neighbour on the ring has connected.
    await until(lambda: bool(c.parts.directory.links))
    async with killed(c):
        for iterator in changes:
            assert await next_of(iterator) == ("lost", "c")
        assert [member.name for member in a.known_members] == ["a", "b"]


async def test_false_loss_is_corrected(quick: Trio) -> None:
    """One worker gives up a live one; the others correct it."""
    a, b, c = quick
    changes = [a.members_changed(), b.members_changed()]
    await b.peer("c").call(remote.add, 1)
    a.parts.membership.on_peer_lost(c.id, "the network was cut here")
    for iterator in changes[:1]:
        assert await next_of(iterator) == ("lost", "c")
        assert await next_of(iterator) == ("back", "c")
    assert c.parts.membership.table.me.version >= 1
    link = b.parts.directory.link_of(c.incarnation)
    assert link is not None
    assert not link.is_lost


async def test_comparison_finds_members_that_gossip_missed(
    quick: Trio, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, c = quick
    changes = [a.members_changed(), b.members_changed(), c.members_changed()]
    for worker in quick:
        # Whatever is to be told gets lost.
        monkeypatch.setattr(worker.parts.membership.gossip, "announce", id)
    async with joining("late", b):
        for iterator in changes:
            assert await next_of(iterator) == ("joined", "late")


# --- where somebody is ---------------------------------------------------------------


async def test_find_asks_other_members(patient: Trio) -> None:
    a, b, c = patient
    for worker in (a, b, c):
        worker.parts.membership.gossip.pass_on = lambda *_: None  # type: ignore[method-assign]
    async with joining("late", c, options=replace(OPTIONS, liveness=PATIENT)):
        with pytest.raises(UnknownWorkerError, match=r"worker\.find"):
            a.peer("late")
        late = await a.find("late")
        assert await late.call(remote.add, 1) == 2
        assert (await a.find("late")).name == "late"
        with pytest.raises(UnknownWorkerError):
            await a.find("nobody", timeout_s=2.0)


async def test_a_call_goes_where_the_worker_is_now(quick: Trio) -> None:
    """Who has not heard the news asks others before it gives up."""
    a, b, c = quick
    await a.peer("b").call(remote.add, 1)
    a.parts.membership.gossip.pass_on = lambda *_: None  # type: ignore[method-assign]
    async with killed(c), joining("c", b):
        stale = replace(
            c.parts.identity.member, addresses=("uds:///nobody/listens/here",)
        )
        a.parts.directory.add([stale])
        assert await a.peer("c").call(remote.add, 1) == 2


# --- static groups -------------------------------------------------------------------


async def test_static_group_admits_no_worker(tmp_path: Path) -> None:
    options = replace(OPTIONS, membership="static")
    async with Cluster(2, network="uds", options=options) as (a, b):
        with pytest.raises(UsageError, match="the group is static"):
            await joining("late", a).__aenter__()
        where = {"b": b.addresses[0], "x": f"uds://{tmp_path}/x"}
        async with Worker("x", rendezvous=where, options=OPTIONS) as x:
            with pytest.raises(
                asyncrpc.WorkerLostError, match="static and has no worker 'x'"
            ):
                await x.peer("b").call(remote.add, 1)
        changes = a.members_changed()
        assert await a.peer("b").call(remote.add, 1) == 2
        await b.shutdown()
        assert await next_of(changes) == ("left", "b")
        where = {"a": a.addresses[0], "b": f"uds://{tmp_path}/b"}
        listen = replace(
            options, network=replace(options.network, listen=(where["b"],))
        )
        async with Worker("b", rendezvous=where, options=listen) as again:
            assert await again.peer("a").call(remote.add, 1) == 2
            assert await next_of(changes) == ("restarted", "b")
        with pytest.raises(UnknownWorkerError):
            await a.find("x")


def test_unknown_kind_of_membership_is_refused() -> None:
    with pytest.raises(UsageError, match="membership"):
        asyncrpc.Options(membership="elastic")


# --- changes -------------------------------------------------------------------------


def change(name: str) -> MemberChange:
    return MemberChange(asyncrpc.ChangeKind.JOINED, WorkerInfo(name, -1), 1)


async def test_the_iteration_ends_with_the_worker(quick: Trio) -> None:
    a, b, _ = quick
    changes = b.members_changed()
    await a.peer("c").call(remote.add, 1)
    waiting = asyncio.create_task(anext(a.members_changed()))
    await asyncio.sleep(0)
    await a.shutdown()
    with pytest.raises(StopAsyncIteration):
        await waiting
    with pytest.raises(NotStartedError):
        a.members_changed()
    assert await next_of(changes) == ("left", "a")


async def test_a_change_is_not_lost_with_a_cancelled_wait() -> None:
    changes = MemberChanges(asyncio.get_running_loop())
    waiting = asyncio.create_task(anext(changes))
    await asyncio.sleep(0)
    with pytest.raises(UsageError, match="another task waits"):
        await anext(changes)
    waiting.cancel()
    changes.put(change("b"))
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await anext(changes) == change("b")


async def test_iterator_far_behind_reports_an_overflow() -> None:
    changes = MemberChanges(asyncio.get_running_loop())
    for number in range(CHANGES_MAX + 2):
        changes.put(change(f"w{number}"))
    changes.end()
    received = [item async for item in changes]
    assert [item.kind.value for item in received] == ["resync", "joined"]
    assert received[1] == change(f"w{CHANGES_MAX + 1}")


async def test_late_iterator_gets_changes_merged_per_worker() -> None:
    changes = MemberChanges(asyncio.get_running_loop())
    lost = MemberChange(asyncrpc.ChangeKind.LOST, WorkerInfo("a", 0), 7)
    changes.put(lost)
    for life in range(CHANGES_MAX):
        kind = asyncrpc.ChangeKind.LEFT if life % 2 else asyncrpc.ChangeKind.JOINED
        changes.put(MemberChange(kind, WorkerInfo("b", -1), 1 + life // 2))
    changes.end()
    assert [item async for item in changes] == [lost]


async def test_abandoned_iterator_costs_nothing(quick: Trio) -> None:
    worker = quick[0]
    for _ in range(10):
        worker.members_changed()
    gc.collect()
    kept = worker.members_changed()
    assert worker.parts.membership._iterators() == [kept]  # noqa: SLF001
