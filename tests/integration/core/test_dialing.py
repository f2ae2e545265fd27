"""Connections are made when they are needed, once, to wherever the peer is now."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import stat
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import asyncrpc
from asyncrpc import Options, Outcome, Worker, WorkerLostError
from asyncrpc.core.links import dialer
from asyncrpc.core.links.connection import Connection
from asyncrpc.core.links.directory import Directory
from asyncrpc.core.links.entry import FirstMessage
from asyncrpc.core.transport.abc import StreamHandler, Transport
from asyncrpc.core.transport.address import Address
from asyncrpc.core.transport.memory import MemoryConnector, MemoryHub
from asyncrpc.core.transport.uds import UdsConnector
from asyncrpc.errors import ConnectError, RefusedError
from asyncrpc.testing import Cluster
from tests.integration.core import remote
from tests.integration.core.conftest import Trio
from tests.integration.core.groups import LIMIT_S, alone, processes, started, until
from tests.integration.core.multiprocessing.pidfds import have_ended, opened
from tests.ports import free_port

ROUNDS = 100
OPTIONS = Options(secret="known to all of the group", drain_timeout_s=0.5)


def on(**network: Any) -> Options:
    """Return the options with another network."""
    return replace(OPTIONS, network=replace(OPTIONS.network, **network))


async def incarnation() -> int:
    return asyncrpc.current_worker().incarnation


def peers(worker: Worker) -> list[str]:
    """Return the peers of the connections that are open."""
    return sorted(link.peer.name for link in worker.parts.directory.links)


async def cut(worker: Worker, to: str, other: Worker) -> None:
    """End the connection between two workers, and wait until both have noticed."""
    links = [
        worker.parts.directory.find(to).link,
        other.parts.directory.find(worker.name).link,
    ]
    connections = [link.connection for link in links if link is not None]
    connections[0].close()
    async with asyncio.timeout(LIMIT_S):
        await asyncio.gather(*(connection.ended for connection in connections))


# --- how many ------------------------------------------------------------------------


@pytest.mark.parametrize("network", ["mem", "uds"])
async def test_simultaneous_dials_keep_a_connection_and_all_calls(network: str) -> None:
    """A hundred rounds, each without a connection at its start."""
    async with Cluster(2, network=network) as (a, b):  # type: ignore[arg-type]
        connections: set[Connection] = set()
        for number in range(ROUNDS):
            calls = [
                worker.parts.start_call(to, remote.add_async, (number, side))
                for side, (worker, to) in enumerate([(a, "b"), (b, "a")] * 2)
            ]
            answers = await asyncio.wait_for(asyncio.gather(*calls), LIMIT_S)
            assert answers == [number + side for side in range(4)]
            assert peers(a) == ["b"]
            assert peers(b) == ["a"]
            connections.update(link.connection for link in a.parts.directory.links)
            await cut(a, "b", b)
        assert len(connections) == ROUNDS


async def test_workers_connect_on_first_use(wired: Trio) -> None:
    a, b, c = wired
    assert [peers(worker) for worker in wired] == [[], [], []]
    await a.peer("b").call(remote.add, 1)
    assert [peers(worker) for worker in wired] == [["b"], ["a"], []]
    await b.peer("a").call(remote.add, 1)
    assert [peers(worker) for worker in wired] == [["b"], ["a"], []]
    await c.peer("b").call(remote.add, 1)
    assert [peers(worker) for worker in wired] == [["b"], ["a", "c"], ["b"]]


async def test_concurrent_calls_share_one_dial(wired: Trio) -> None:
    a, b, _ = wired
    calls = [a.parts.start_call("b", remote.add_async, (n,)) for n in range(50)]
    assert await asyncio.gather(*calls) == list(range(1, 51))
    assert peers(a) == ["b"]
    assert peers(b) == ["a"]


class LateRefusal(MemoryConnector):
    """Its first dial is refused when it is told, whoever listens by then."""

    def __init__(self, hub: MemoryHub) -> None:
        super().__init__(hub)
        self.dialing, self.refusing = asyncio.Event(), asyncio.Event()

    async def connect(self, address: Address, handler: StreamHandler) -> Transport:
        if not self.dialing.is_set():
            self.dialing.set()
            await self.refusing.wait()  # the test sets it
            raise RefusedError(f"nobody listens at {address}")
        return await super().connect(address, handler)


@pytest.fixture
def all_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let workers of a mapping count as met: those that were not are waited for."""
    monkeypatch.setattr(dialer, "UNKNOWN_INCARNATION", None)


def refused_late() -> tuple[LateRefusal, Worker, Worker]:
    hub = MemoryHub()
    where, network = {"a": "mem://a", "b": "mem://b"}, LateRefusal(hub)
    a = Worker("a", rendezvous=where, network=network, options=OPTIONS)
    b = Worker("b", rendezvous=where, network=hub.connector(), options=OPTIONS)
    return network, a, b


@pytest.mark.usefixtures("all_met")
async def test_call_that_joins_a_dial_outlives_an_earlier_refusal() -> None:
    network, a, b = refused_late()
    async with started(a):
        first = a.parts.start_call("b", remote.add, (1,))
        await network.dialing.wait()
        async with started(b):
            later = a.parts.start_call("b", remote.add, (2,))
            await asyncio.sleep(0)
            network.refusing.set()
            assert await later == 3
            with pytest.raises(WorkerLostError, match="nobody listens"):
                await first


@pytest.mark.usefixtures("all_met")
async def test_failed_dial_uses_the_connection_the_peer_dialed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network, a, b = refused_late()
    network.refusing.set()
    asking, answered = asyncio.Event(), asyncio.Event()

    async def ask(_name: str) -> bool:
        asking.set()
        await answered.wait()  # the test sets it
        return False

    async with started(a, b):
        monkeypatch.setattr(a.parts.membership, "refresh", ask)
        call = a.parts.start_call("b", remote.add, (1,))
        await asking.wait()
        assert await b.peer("a").call(remote.add, 2) == 3
        answered.set()
        assert await call == 2


async def test_cancelled_call_leaves_its_dial_to_other_calls(wired: Trio) -> None:
    a, b, _ = wired
    given_up = asyncio.create_task(a.peer("b").call(remote.add_async, 1))
    await asyncio.sleep(0)
    kept = asyncio.create_task(a.peer("b").call(remote.add_async, 2))
    await asyncio.sleep(0)
    given_up.cancel()
    assert await kept == 3
    assert peers(b) == ["a"]
    await asyncio.wait([given_up])
    assert given_up.cancelled()


async def test_dial_of_busy_loop_loses_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer uses the connection before the dial has had its turn to end.

    With the first call that comes over it this worker may import a module: for seconds,
    after which the time for the dial is up.
    """
    options = on(connect_timeout_s=0.5)
    on_hello = Directory.on_answer

    def on_slow_hello(self: Directory, *args: Any) -> None:
        on_hello(self, *args)
        time.sleep(2 * options.network.connect_timeout_s)

    async with processes("b", options=options) as a:
        called = asyncio.create_task(a.peer("b").call(remote.add, 1))
        with monkeypatch.context() as patch:
            patch.setattr(Directory, "on_answer", on_slow_hello)
            assert await asyncio.wait_for(called, LIMIT_S) == 2
        (link,) = a.parts.directory.links
        assert await a.peer("b").call(remote.add, 2) == 3
        assert a.parts.directory.links == [link]


async def test_unconfirmed_connection_carries_no_calls(
    wired: Trio, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its dialer may hold another one by then, and would lose the calls."""
    a, b, _ = wired
    held: list[tuple[FirstMessage, tuple[Any, ...]]] = []
    with monkeypatch.context() as patch:
        patch.setattr(
            FirstMessage, "on_message", lambda self, *rest: held.append((self, rest))
        )
        link = await a.parts.directory.connect(a.parts.directory.find("b"))
        called = asyncio.create_task(b.peer("a").call(remote.add, 1))
        await until(lambda: bool(held))
        assert a.parts.directory.find("b").link is link
        assert b.parts.directory.find("a").link is None
        assert not called.done()
    for first, message in held:
        first.on_message(*message)
    assert await called == 2
    assert [len(worker.parts.directory.links) for worker in (a, b)] == [1, 1]


async def test_end_of_an_unused_connection_loses_no_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """References that the peer holds stay."""
    store = f"file://{tmp_path}/store"
    options = replace(
        OPTIONS, liveness=replace(OPTIONS.liveness, lost_after_s=1.0, heartbeat_s=0.3)
    )
    first, second = (
        Worker(name, rank=rank, world_size=2, rendezvous=store, options=options)
        for rank, name in enumerate("ab")
    )
    async with started(first, second):
        with monkeypatch.context() as patch:
            patch.setattr(FirstMessage, "on_message", lambda *_: None)
            link = await first.parts.directory.connect(first.parts.directory.find("b"))
            await until(lambda: bool(second.parts.directory.links))
            (taken,) = second.parts.directory.links
            link.connection.fail(ConnectError("given up"))
            await asyncio.wait_for(taken.connection.ended, LIMIT_S)
        assert second.counters.workers_lost == 0
        assert await second.peer("a").call(remote.add, 1) == 2


# --- restarts ------------------------------------------------------------------------


@asynccontextmanager
async def listed(
    name: str, where: Mapping[str, str], listen: str | None = None
) -> AsyncIterator[Worker]:
    options = on(listen=(listen or where[name],))
    async with Worker(name, rendezvous=where, options=options) as worker:
        yield worker


@pytest.mark.parametrize("scheme", ["uds", "tcp"])
async def test_worker_restarted_in_place_is_found(scheme: str, tmp_path: Path) -> None:
    where = {name: f"uds://{tmp_path}/{name}" for name in "ab"}
    if scheme == "tcp":
        where = {name: f"tcp://127.0.0.1:{free_port()}" for name in "ab"}
    async with listed("a", where) as a:
        incarnations = set()
        for _ in range(3):
            async with listed("b", where) as b:
                assert await a.peer("b").call(remote.add, 1) == 2
                assert await b.peer("a").call(remote.add, 2) == 3
                link = a.parts.directory.find("b").link
                assert link is not None
                assert link.peer == b.id
                incarnations.add(b.incarnation)
            with pytest.raises(WorkerLostError) as caught:
                await a.peer("b").call(remote.add, 1)
            assert caught.value.outcome is Outcome.NOT_EXECUTED
        assert len(incarnations) == 3


async def test_moved_worker_is_found_after_its_first_call(tmp_path: Path) -> None:
    where = {name: f"uds://{tmp_path}/{name}" for name in "ab"}
    async with listed("a", where) as a:
        async with listed("b", where) as b:
            assert await a.peer("b").call(remote.add, 1) == 2
        async with listed("b", where, listen=f"uds://{tmp_path}/elsewhere") as b:
            assert await b.peer("a").call(remote.add, 1) == 2
            assert await a.peer("b").call(remote.add, 1) == 2
            await cut(a, "b", b)
            assert await a.peer("b").call(remote.add, 1) == 2


async def test_new_address_may_arrive_during_a_dial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Cluster(2, network="uds") as (a, _):
        there = a.parts.directory.find("b").member
        a.parts.directory.add([replace(there, addresses=(f"uds://{tmp_path}/left",))])
        connect = UdsConnector.connect

        async def word_comes(
            connector: UdsConnector, address: Address, handler: StreamHandler
        ) -> Transport:
            a.parts.directory.add([there])
            return await connect(connector, address, handler)

        monkeypatch.setattr(UdsConnector, "connect", word_comes)
        assert await a.peer("b").call(remote.add, 1) == 2


async def test_unnoticed_restart_keeps_incarnations_apart() -> None:
    """The new life calls while the connection to the old one still looks open."""
    hub = MemoryHub()
    where = {"a": "mem://a", "b": "mem://b"}
    a, old = (
        Worker(name, rendezvous=where, network=hub.connector(), options=OPTIONS)
        for name in "ab"
    )
    async with started(a, old):
        waiting = a.parts.start_call("b", remote.sleep_long)
        await a.peer("b").call(remote.add, 1)
        for listener in old.parts.listeners:  # dead, and nobody has noticed
            await listener.close()
        for link in old.parts.directory.links:
            link.connection.stream.pause_reading()
        new = Worker("b", rendezvous=where, network=hub.connector(), options=OPTIONS)
        async with started(new):
            assert await new.peer("a").call(remote.add, 1) == 2
            with pytest.raises(WorkerLostError) as caught:
                await waiting
            assert caught.value.outcome is Outcome.UNKNOWN
            assert await a.peer("b").call(incarnation) == new.incarnation


# --- addresses -----------------------------------------------------------------------


def listening(*listen: str, interface: str | None = None) -> Worker:
    options = on(listen=listen, interface=interface)
    return alone("b", options)


async def answers(
    address: str | Sequence[str], folder: Path, connect_timeout_s: float = 2.0
) -> bool:
    """Say whether worker `b` can be called at an address."""
    where: dict[str, Any] = {"a": f"uds://{folder}/a", "b": address}
    options = on(listen=(where["a"],), connect_timeout_s=connect_timeout_s)
    async with Worker("a", rendezvous=where, options=options) as a:
        return bool(await a.peer("b").call(remote.add, 1) == 2)


@pytest.mark.parametrize(
    ("listen", "versions"),
    [
        ("tcp://127.0.0.1:0", {4}),
        ("tcp://0.0.0.0:0", {4}),
        ("tcp://[::1]:0", {6}),
        ("tcp://[::]:0", {4, 6}),
    ],
)
async def test_published_addresses_reach_the_worker(
    listen: str, versions: set[int], tmp_path: Path
) -> None:
    async with listening(listen) as b:
        published = [Address.parse(address) for address in b.addresses]
        hosts = [ipaddress.ip_address(address.host) for address in published]
        assert {host.version for host in hosts} == versions
        assert not any(host.is_unspecified for host in hosts)
        assert all(address.port for address in published)
        for address in b.addresses:
            assert await answers(address, tmp_path)


async def test_worker_with_a_secret_listens_on_uds_and_tcp(tmp_path: Path) -> None:
    async with alone("b", on(listen=None)) as b:
        assert {address.partition(":")[0] for address in b.addresses} == {"uds", "tcp"}
        for address in b.addresses:
            assert await answers(address, tmp_path)


async def test_worker_without_a_secret_listens_on_a_private_socket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("ASYNCRPC_SECRET", raising=False)
    async with alone("b") as b:
        (address,) = b.addresses
        path = Path(address.removeprefix("uds://"))
        assert kind_and_rights(path)[0] == stat.S_IFSOCK
        assert kind_and_rights(path.parent) == (stat.S_IFDIR, 0o700)
    with pytest.raises(FileNotFoundError):
        kind_and_rights(path.parent)


def kind_and_rights(path: Path) -> tuple[int, int]:
    mode = path.stat().st_mode
    return stat.S_IFMT(mode), stat.S_IMODE(mode)


async def test_chosen_interface_limits_the_published_addresses() -> None:
    async with listening("tcp://0.0.0.0:0", interface="lo") as b:
        assert {Address.parse(address).host for address in b.addresses} == {"127.0.0.1"}


@contextlib.contextmanager
def deaf() -> Iterator[int]:
    """Yield a port where a connection is neither accepted nor refused."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.socket())
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(3):  # its queue is full with these
            caller = stack.enter_context(socket.socket())
            caller.settimeout(0)
            caller.connect_ex(server.getsockname())
        yield server.getsockname()[1]


async def test_dead_addresses_cost_a_moment_and_not_the_call(tmp_path: Path) -> None:
    """One that refuses, and one that is silent: that one has an hour."""
    async with listening("tcp://127.0.0.1:0") as b:
        refusing = f"tcp://127.0.0.1:{free_port()}"
        with deaf() as port:
            for dead in (refusing, f"tcp://127.0.0.1:{port}"):
                async with asyncio.timeout(LIMIT_S):
                    assert await answers((dead, *b.addresses), tmp_path, 3600.0)


async def test_unreachable_worker_is_lost_with_all_reasons(tmp_path: Path) -> None:
    dead = [f"tcp://127.0.0.1:{free_port()}", f"uds://{tmp_path}/nobody"]
    with pytest.raises(WorkerLostError, match="cannot be reached") as caught:
        await answers(dead, tmp_path)
    for address in dead:
        assert address in str(caught.value)
    assert caught.value.outcome is Outcome.NOT_EXECUTED


async def test_call_ends_at_its_deadline_while_dialing(tmp_path: Path) -> None:
    where = {"a": f"uds://{tmp_path}/a"}
    with deaf() as port:
        where["b"] = f"tcp://127.0.0.1:{port}"
        async with listed("a", where) as a:
            with pytest.raises(TimeoutError) as caught:
                await a.peer("b").using(timeout_s=0.1).call(remote.add, 1)
            assert getattr(caught.value, "outcome", None) is Outcome.NOT_EXECUTED


async def test_a_killed_process_is_replaced_under_its_name() -> None:
    async with (cluster := processes("b", options=OPTIONS)) as a:
        assert await a.peer("b").call(remote.add, 1) == 2
        with opened([cluster.pid("b")]) as descriptors:
            cluster.kill("b")
            assert await asyncio.to_thread(have_ended, descriptors, LIMIT_S)
        # Until then a call waits on the broken connection, and ends with it.
        await until(lambda: a.counters.workers_lost == 1)
        places = a.parts.directory.find("b").member.addresses
        options = on(listen=places)
        async with Worker("b", rendezvous={"b": places}, options=options) as again:
            assert await a.peer("b").call(incarnation) == again.incarnation
