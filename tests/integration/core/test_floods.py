"""Who has proved nothing can take little, and cannot keep others out."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from asyncrpc import NetworkOptions, Options, Worker
from asyncrpc.core.links import sidecar
from asyncrpc.core.links.evidence import evidence_of
from asyncrpc.core.links.machine.detector import Evidence
from asyncrpc.core.sidecar import query
from asyncrpc.core.wire.frames import VERSION
from asyncrpc.core.wire.handshake import PREFACE
from tests.certificates import Authority
from tests.integration.core import remote
from tests.integration.core.groups import LIMIT_S, alone, until
from tests.integration.core.raw_connections import dialed, read_to_the_end

SECRET = "the right one of many"
QUICK = Options(
    secret=SECRET,
    # What ends a stranger here is others, not time.
    network=NetworkOptions(listen=("tcp://127.0.0.1:0",), handshake_timeout_s=60.0),
    drain_timeout_s=0.5,
)
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@asynccontextmanager
async def serving(options: Options) -> AsyncIterator[Worker]:
    async with alone("ps", options) as worker:
        yield worker
        await until(lambda: not worker.parts.directory.admission)


@asynccontextmanager
async def friend_of(server: Worker, name: str = "friend") -> AsyncIterator[Worker]:
    where = {name: "tcp://127.0.0.1:9", "ps": server.addresses}
    options = replace(QUICK, tls=server.options.tls)
    async with Worker(name, rendezvous=where, options=options) as worker:
        yield worker


@contextmanager
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 8192:
        pytest.skip("this system allows too few open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 8192), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Crowd:
    """Plain sockets that are connected to a worker and say little."""

    def __init__(self, server: Worker) -> None:
        url = urlsplit(server.addresses[0])
        self._at = (url.hostname, url.port)
        self.sockets: list[socket.socket] = []

    async def join(self, count: int, says: bytes = b"") -> None:
        """Connect so many more; what they say is sent and nothing is read."""
        loop = asyncio.get_running_loop()
        for _ in range(count):
            sock = socket.socket()
            self.sockets.append(sock)
            sock.settimeout(0)
            await loop.sock_connect(sock, self._at)
            self.say(sock, says)

    def say(self, sock: socket.socket, words: bytes) -> None:
        with contextlib.suppress(OSError):  # it may have been put out
            sock.send(words)

    def leave(self) -> None:
        for sock in self.sockets:
            sock.close()


@asynccontextmanager
async def crowd_at(server: Worker) -> AsyncIterator[Crowd]:
    crowd = Crowd(server)
    try:
        with many_files():
            yield crowd
    finally:
        crowd.leave()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


async def test_oldest_stranger_is_dropped_beyond_the_limit() -> None:
    async with (
        serving(
            replace(QUICK, limits=replace(QUICK.limits, handshakes_max=2))
        ) as server,
        dialed(server) as first,
        dialed(server) as second,
    ):
        await until(lambda: len(server.parts.directory.admission) == 2)
        async with dialed(server) as third:
            assert await read_to_the_end(first[0]) == b""
            preface = PREFACE.pack(b"ARPC", VERSION, 1, 0, bytes(32))
            for reader, writer in (second, third):  # they are still listened to
                writer.write(preface)
                assert (await reader.readexactly(PREFACE.size)).startswith(b"ARPC")
        assert server.counters.connections_dropped_unauthenticated == 1


async def test_silent_connections_keep_no_peer_out() -> None:
    async with (
        serving(
            replace(QUICK, limits=replace(QUICK.limits, handshakes_max=8))
        ) as server,
        crowd_at(server) as crowd,
    ):
        await crowd.join(50)
        async with friend_of(server) as friend:
            assert await friend.peer("ps").call(remote.add, 1) == 2
        assert len(server.parts.directory.admission) <= 8
        await until(lambda: server.counters.connections_dropped_unauthenticated >= 42)


@pytest.mark.parametrize("encrypted", [False, True])
async def test_calls_continue_during_a_flood(
    tmp_path: Path, *, encrypted: bool
) -> None:
    """A thousand say nothing, a thousand say nonsense, and friends are served."""
    tls = Authority(tmp_path).tls() if encrypted else None
    async with (
        serving(replace(QUICK, tls=tls)) as server,
        friend_of(server) as friend,
        crowd_at(server) as crowd,
    ):
        assert await friend.peer("ps").call(remote.add, 1) == 2
        flood = asyncio.create_task(crowd.join(1000))
        calls = 0
        while not flood.done():
            assert await friend.peer("ps").call(remote.add, calls) == calls + 1
            calls += 1
        flood = asyncio.create_task(crowd.join(1000, os.urandom(200)))
        async with friend_of(server, "newcomer") as newcomer:
            while not flood.done():
                assert await newcomer.peer("ps").call(remote.add, calls) == calls + 1
                calls += 1
            assert await friend.peer("ps").call(remote.add, 1) == 2
        assert len(server.parts.directory.admission) <= QUICK.limits.handshakes_max
        # Each was in the middle of something when it was put out or refused.
        counters = server.counters
        await until(
            lambda: (
                counters.connections_dropped_unauthenticated
                + counters.handshakes_refused
                + counters.authentications_failed
                >= 2000 - QUICK.limits.handshakes_max
            )
        )


async def test_questions_of_strangers_keep_no_peer_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of those that begin as a query and do not go on, the oldest are closed."""
    monkeypatch.setattr(sidecar, "CONNECTION_S", 10 * LIMIT_S)
    async with serving(QUICK) as server, crowd_at(server) as crowd:
        await crowd.join(2 * sidecar.CONNECTIONS_MAX, query.ASKED)
        async with friend_of(server):  # so all of them have been accepted
            evidence = await evidence_of(
                replace(server.parts.hello(), host_id="another host"),
                credentials_pid=None,
                secret=SECRET.encode(),
                timeout_s=LIMIT_S,
            )
        assert evidence is Evidence.TICKING


@pytest.mark.parametrize("encrypted", [False, True])
async def test_stranger_takes_bounded_memory(
    tmp_path: Path, *, encrypted: bool
) -> None:
    """Of the 2,000 here, both ends of each are in this process."""
    tls = Authority(tmp_path).tls() if encrypted else None
    count = 2000
    options = replace(
        QUICK, limits=replace(QUICK.limits, handshakes_max=2 * count), tls=tls
    )
    async with serving(options) as server, crowd_at(server) as crowd:
        await crowd.join(50)  # what is allocated once
        before = resident_bytes()
        await crowd.join(count)
        await until(lambda: len(server.parts.directory.admission) == count + 50)
        silent = resident_bytes()
        assert silent - before < count * (32 << 10)
        said = (
            b"ARPC" + bytes(35) if tls is None else b"\x16\x03\x01\x02\x00" + bytes(34)
        )
        for sock in crowd.sockets:
            for byte in range(0, len(said), 13):
                crowd.say(sock, said[byte : byte + 13])
        async with friend_of(server) as friend:  # so all of it has been read
            assert await friend.peer("ps").call(remote.add, 1) == 2
        # OpenSSL keeps what it needs for a handshake from its first byte on.
        each_max = 4 << 10 if tls is None else 96 << 10
        assert resident_bytes() - silent < count * each_max


async def test_invalid_preface_is_refused_at_its_first_byte() -> None:
    """Not when 40 bytes are here, and not after a time."""
    async with serving(QUICK) as server:
        for nonsense in (b"G", b"AX", b"ARPX", b"\0"):
            async with dialed(server) as (reader, writer):
                writer.write(nonsense)
                assert await asyncio.wait_for(read_to_the_end(reader), LIMIT_S) == b""
        await until(lambda: server.counters.handshakes_refused == 4)
        async with dialed(server) as (reader, writer):
            for byte in b"ARPC":
                writer.write(bytes([byte]))
                await writer.drain()
            writer.write(PREFACE.pack(b"ARPC", VERSION, 1, 0, bytes(32))[4:])
            assert (await reader.readexactly(PREFACE.size)).startswith(b"ARPC")
