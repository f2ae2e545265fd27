"""Guests, which came from outside with a token, over loopback."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

import asyncrpc
from asyncrpc import LocalRendezvous, NetworkOptions, Options, Worker, WorkerLostError
from asyncrpc.core.identity import WorkerIdentity
from asyncrpc.core.wire.frames import FrameKind, Hello
from asyncrpc.errors import RejectedError, RendezvousTimeoutError, UsageError
from tests.integration.core.groups import LIMIT_S, outcomes, started
from tests.integration.core.test_membership import next_of
from tests.ports import free_port
from tests.raw_messages import request

OPTIONS = Options(
    drain_timeout_s=1.0,
    rendezvous_timeout_s=30.0,
    liveness=asyncrpc.LivenessOptions(heartbeat_s=1.0, lost_after_s=4.0),
)
INSIDE = Options(
    secret="a secret of those inside",
    drain_timeout_s=1.0,
    network=NetworkOptions(listen=("tcp://127.0.0.1:0",)),
    liveness=OPTIONS.liveness,
)


Pair = tuple[Worker, Worker]


@pytest.fixture
async def inside() -> AsyncIterator[Pair]:
    meeting = LocalRendezvous(2)
    gateway, other = (
        Worker(name, rank=rank, rendezvous=meeting, options=INSIDE)
        for rank, name in enumerate(("gateway", "other"))
    )
    async with started(gateway, other):
        yield gateway, other


@pytest.fixture
def gateway(inside: Pair) -> Worker:
    return inside[0]


def door_of(gateway: Worker) -> str:
    return gateway.addresses[0].replace("tcp://", "join://")


# --- what users mistake -------------------------------------------------------------


def stranger(door: str, token: str | None, name: str = "laptop") -> Worker:
    """Make a guest that does not wait for long."""
    network = NetworkOptions(connect_timeout_s=0.3)
    options = Options(token=token, network=network, rendezvous_timeout_s=1.0)
    return Worker(name, rendezvous=door, options=options)


@pytest.mark.parametrize(
    ("door", "words"),
    [
        ("join:/10.0.0.1:7000", "rendezvous must be env://.*join://host:port"),
        ("join//10.0.0.1:7000", "rendezvous must be env://.*join://host:port"),
        ("joins://10.0.0.1:7000", "rendezvous must be env://.*join://host:port"),
        ("join://", "rendezvous must be join://host:port of a running worker"),
        ("join://,", "rendezvous must be join://host:port of a running worker"),
        ("join://10.0.0.1", "must be tcp://host:port with a port"),
        ("JOIN://10.0.0.1", "must be tcp://host:port with a port"),
        ("join://10.0.0.1:77777", "must be tcp://host:port with a port"),
        ("join://http://10.0.0.1:80", "must be tcp://host:port"),
    ],
)
def test_mistyped_join_address_is_refused_at_once(door: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        stranger(door, None)


async def test_unusable_token_is_refused_at_once_with_a_reason(inside: Pair) -> None:
    gateway, other = inside
    door = door_of(gateway)
    good = gateway.tokens.issue(valid_s=600.0, name="laptop")
    revoked = gateway.tokens.issue(valid_s=600.0, name="laptop")
    assert gateway.tokens.revoke(revoked)
    altered = good[:-6] + ("A" if good[-6] != "A" else "B") + good[-5:]
    for token, words in (
        (revoked, "refused our token: it has expired, was revoked, or another"),
        (gateway.tokens.issue(valid_s=0.0), "refused our token: it has expired"),
        (other.tokens.issue(valid_s=600.0), "refused our token: .* another worker has"),
        (altered, "refused our token: .* it was not copied whole"),
    ):
        await asyncio.sleep(0)  # the time of the second is over
        with pytest.raises(asyncrpc.errors.AuthenticationError, match=words):
            await stranger(door, token).__aenter__()


async def test_token_admits_one_worker_at_a_time(gateway: Worker) -> None:
    async with guests(gateway, "laptop") as (laptop,):
        token = laptop.options.token
        for name, words in (
            ("laptop", "the name 'laptop' is taken by a running worker"),
            ("notebook", "its token is that of worker 'laptop'"),
        ):
            with pytest.raises(UsageError, match=words):
                await stranger(door_of(gateway), token, name).__aenter__()
        assert await laptop.peer("gateway").call(len, "abc") == 3


@asynccontextmanager
async def listening(answer: bytes) -> AsyncIterator[str]:
    """Be another service: it answers so whoever connects, or says nothing."""
    writers: list[asyncio.StreamWriter] = []

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        if answer:
            writer.write(answer)
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"join://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        for writer in writers:
            writer.close()
        server.close()


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (b"HTTP/1.1 400 No\r\n\r\n", asyncrpc.errors.MalformedError, "are b'HTTP'"),
        (b"", RendezvousTimeoutError, "listens there, but did not answer"),
    ],
    ids=["http", "silent"],
)
async def test_port_of_another_service_is_not_taken_for_a_worker(
    gateway: Worker, answer: bytes, error: type[Exception], words: str
) -> None:
    token = gateway.tokens.issue(valid_s=600.0)
    async with listening(answer) as door:
        with pytest.raises(error, match=words):
            await stranger(door, token).__aenter__()


async def test_workers_that_only_join_each_other_are_told_the_remedy() -> None:
    ports = free_port(), free_port()

    def worker(number: int) -> Worker:
        listen = (f"tcp://127.0.0.1:{ports[number]}",)
        network = NetworkOptions(listen=listen, connect_timeout_s=0.5)
        options = replace(INSIDE, network=network, rendezvous_timeout_s=2.0)
        other = f"join://127.0.0.1:{ports[1 - number]}"
        return Worker(f"w{number}", rendezvous=other, options=options)

    for number, error in enumerate(await outcomes(worker(0), worker(1))):
        assert isinstance(error, RendezvousTimeoutError)
        assert f"'w{1 - number}' asked this worker for admission" in str(error)
        assert "Start one of them, or all, with another rendezvous" in str(error)


class _Elsewhere:
    """A guest in a thread and on a loop of its own, as a process has them."""

    def __init__(self, door: str, token: str, names: list[str]) -> None:
        self._door, self._token, self._names = door, token, names
        self._leave = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.is_there, self.has_left = threading.Event(), threading.Event()

    def run(self) -> None:
        try:
            asyncio.run(self._live())
        finally:
            self.is_there.set()
            self.has_left.set()

    async def _live(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with Worker(
            "laptop",
            rendezvous=self._door,
            options=Options(token=self._token, liveness=OPTIONS.liveness),
        ) as laptop:
            for name in self._names:
                assert await laptop.peer(name).call(len, "abc") == 3
            self.is_there.set()
            await self._leave.wait()
            await laptop.shutdown(drain_timeout_s=0.0)

    def leave(self) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._leave.set)


@contextmanager
def elsewhere(door: str, token: str, *names: str) -> Iterator[_Elsewhere]:
    """Run a guest that has called some members; it leaves with the block."""
    guest = _Elsewhere(door, token, list(names))
    thread = threading.Thread(target=guest.run)
    thread.start()
    try:
        yield guest
    finally:
        if not guest.has_left.is_set():
            guest.leave()
        thread.join(LIMIT_S)


@asynccontextmanager
async def guests(gateway: Worker, *names: str) -> AsyncIterator[list[Worker]]:
    """Run guests of a gateway, which all know each other."""

    def seat(name: str) -> Worker:
        token = gateway.tokens.issue(valid_s=600.0, name=name)
        options = replace(OPTIONS, token=token)
        return Worker(name, rendezvous=door_of(gateway), options=options)

    workers = [seat(name) for name in names]
    async with started(*workers):
        for guest in workers:
            for name in names:
                await guest.find(name, timeout_s=LIMIT_S)
        yield workers


async def test_guest_stays_a_guest_to_other_guests(
    gateway: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guest lies about itself in its hello."""

    def lying(self: Any, **more: Any) -> Hello:
        said: Hello = honest(self, **more)
        where = ("tcp://127.0.0.1:9",)
        return replace(said, addresses=where, host_id="here", rank=0, sidecar=where)

    honest = WorkerIdentity.hello
    async with guests(gateway, "a", "b") as (a, b):
        monkeypatch.setattr(WorkerIdentity, "hello", lying)
        assert await a.peer("b").call(len, "abc") == 3
        for side, other in ((a, "b"), (b, "a")):
            link: Any = side.parts.directory.link_to(other)
            assert link.is_guest
            assert link.connection.peer.addresses == ("relay://gateway",)
            assert (link.connection.peer.sidecar, link.connection.peer.rank) == ((), -1)
            with pytest.raises(RejectedError, match=r"\(guest\) may not send"):
                await request(link, "inspection", "clock", [])


def count_to(number: int) -> Iterator[int]:
    yield from range(number)


def fill(value: float) -> torch.Tensor:
    return torch.full((4_000_000,), value)  # 16 MB: it goes by lanes


async def test_guests_call_each_other_through_their_gateway(gateway: Worker) -> None:
    async with guests(gateway, "a", "b") as (a, b):
        for caller, callee in ((a, "b"), (b, "a")):
            peer = caller.peer(callee)
            assert await peer.call(len, "abc") == 3
            assert torch.equal(await peer.call(fill, 2.0), fill(2.0))
            assert torch.equal(await peer.call(torch.neg, fill(1.0)), fill(-1.0))
            assert [item async for item in peer.stream(count_to, 100)] == [*range(100)]
            assert await peer.remote(list, "abc").to_here() == [*"abc"]
        links = a.parts.directory.link_to("b"), b.parts.directory.link_to("a")
        assert len({link.connection.token for link in links if link is not None}) == 1


async def test_guests_that_call_each_other_at_once_share_a_connection(
    gateway: Worker,
) -> None:
    names = ("a", "b", "c", "d")
    async with guests(gateway, *names) as workers:
        calls = [
            guest.peer(name).call(len, name)
            for guest in workers
            for name in names
            if name != guest.name
        ]
        assert await asyncio.gather(*calls) == [1] * 12
        for guest in workers:
            peers = [link.peer.name for link in guest.parts.directory.links]
            assert sorted(set(peers) & set(names)) == sorted(set(names) - {guest.name})


async def test_connection_of_guests_is_resumed(gateway: Worker) -> None:
    async with guests(gateway, "a", "b") as (a, b):
        assert await a.peer("b").call(len, "abc") == 3
        before = a.parts.counters.connections_resumed
        for splice in tuple(gateway.parts.directory.relay.splices):
            splice.abort()
        assert await b.peer("a").call(len, "abc") == 3
        assert await a.peer("b").call(len, "abc") == 3
        assert a.parts.counters.connections_resumed > before


async def test_revoked_token_ends_all_connections_of_its_guest(gateway: Worker) -> None:
    async with guests(gateway, "a", "b") as (a, b):
        assert await a.peer("b").call(len, "abc") == 3
        changes = a.members_changed()
        assert b.options.token is not None
        assert gateway.tokens.revoke(b.options.token)
        assert await next_of(changes) == ("lost", "b")
        with pytest.raises(WorkerLostError):
            await a.peer("b").call(len, "abc")


async def test_guests_without_a_gateway_name_it(gateway: Worker) -> None:
    async with guests(gateway, "a", "b") as (a, _b):
        await gateway.shutdown(drain_timeout_s=0.0)
        with pytest.raises(WorkerLostError, match="gateway"):
            await a.peer("b").call(len, "abc")


async def test_guests_of_two_gateways_are_refused_to_each_other(inside: Pair) -> None:
    gateway, other = inside
    async with guests(gateway, "a") as (a,), guests(other, "b"):
        for worker in (gateway, a):
            await worker.find("b", timeout_s=LIMIT_S)
        with pytest.raises(WorkerLostError, match="join through the same member"):
            await a.peer("b").call(len, "abc")


async def test_guest_leaves_a_busy_gateway(gateway: Worker) -> None:
    """The gateway writes to it before it has read the farewell."""
    token = gateway.tokens.issue(valid_s=600.0, name="laptop")
    changes = gateway.members_changed()
    with elsewhere(door_of(gateway), token, "gateway") as laptop:
        assert await next_of(changes) == ("joined", "laptop")
        await asyncio.to_thread(laptop.is_there.wait, LIMIT_S)
        link = gateway.parts.directory.link_to("laptop")
        assert link is not None
        # In one turn of the gateway's loop.
        laptop.leave()
        laptop.has_left.wait(LIMIT_S)
        link.connection.send(FrameKind.PING, 0)
        link.connection.stream.flush()
        assert await next_of(changes) == ("left", "laptop")
