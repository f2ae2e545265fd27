"""Strangers get nothing: no connection, no memory, no function; the worker lives on."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator
from dataclasses import replace
from urllib.parse import urlsplit

import pytest

import asyncrpc
from asyncrpc import (
    LimitOptions,
    LocalRendezvous,
    NetworkOptions,
    Options,
    Policy,
    RejectedError,
    UsageError,
    Worker,
)
from asyncrpc.errors import AuthenticationError
from asyncrpc.testing import Cluster, ProcessCluster
from tests.integration.core import remote
from tests.integration.core.groups import LIMIT_S, until

QUICK = Options(
    drain_timeout_s=0.5,
    network=NetworkOptions(connect_timeout_s=1.0, handshake_timeout_s=1.0),
)
TCP = replace(QUICK, network=replace(QUICK.network, listen=("tcp://127.0.0.1:0",)))


@pytest.fixture
async def server() -> AsyncIterator[Worker]:
    options = replace(TCP, secret="the right one of many")
    where = LocalRendezvous(1)
    async with Worker("ps", rank=0, rendezvous=where, options=options) as worker:
        yield worker


def caller(server: Worker, options: Options) -> Worker:
    where = {"me": "tcp://127.0.0.1:9", "ps": server.addresses}
    return Worker("me", rendezvous=where, options=options)


async def works(server: Worker) -> bool:
    async with caller(server, replace(TCP, secret="the right one of many")) as me:
        return bool(await me.peer("ps").call(remote.add, 1) == 2)


async def test_listening_to_strangers_without_a_secret_is_refused() -> None:
    options = replace(TCP, secret=None)
    worker = Worker("a", rank=0, rendezvous=LocalRendezvous(1), options=options)
    with pytest.raises(UsageError, match="ASYNCRPC_SECRET"):
        async with worker:
            pass


@pytest.mark.parametrize("listen", [None, ("tcp://0.0.0.0:0",), ("tcp://[::]:0",)])
async def test_weak_secret_is_refused_beyond_the_host(
    listen: tuple[str, ...] | None,
) -> None:
    network = replace(TCP.network, listen=listen)
    options = replace(TCP, secret="letters", network=network)
    worker = Worker("a", rank=0, rendezvous=LocalRendezvous(1), options=options)
    with pytest.raises(UsageError, match=r"a secret of 7 characters.*at least 16"):
        async with worker:
            pass


@pytest.mark.parametrize(
    "network",
    [
        TCP.network,
        replace(TCP.network, listen=("tcp://[::1]:0",)),
        replace(TCP.network, listen=None, interface="lo"),
    ],
    ids=["127.0.0.1", "::1", "lo"],
)
async def test_weak_secret_is_warned_of_on_one_host(
    network: NetworkOptions, caplog: pytest.LogCaptureFixture
) -> None:
    options = replace(TCP, secret="letters", network=network)
    async with Worker("a", rank=0, rendezvous=LocalRendezvous(1), options=options):
        assert "'a': its secret has 7 characters" in caplog.text
        assert "letters" not in caplog.text
    caplog.clear()
    options = replace(options, secret="0123456789abcdef")
    async with Worker("a", rank=0, rendezvous=LocalRendezvous(1), options=options):
        assert not caplog.text


async def test_wrong_secret_fails_the_caller_and_spares_the_server(
    server: Worker,
) -> None:
    async with caller(server, replace(TCP, secret="a wrong one of many")) as me:
        with pytest.raises(AuthenticationError):
            await me.peer("ps").call(remote.add, 1)
    assert server.parts.directory.links == []
    assert await works(server)


def hostile_bytes() -> dict[str, bytes]:
    return {
        "nothing": b"",
        "garbage": bytes(range(256)) * 8,
        "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        "zeros": bytes(4096),
        "ones": b"\xff" * 4096,
        "our magic, another version": b"ARPC\xff" + bytes(200),
        "our magic, a huge length": b"ARPC\x02" + struct.pack("<Q", 1 << 62) * 40,
    }


@pytest.mark.parametrize("name", hostile_bytes())
async def test_bytes_of_strangers_end_their_own_connection(
    server: Worker, name: str
) -> None:
    url = urlsplit(server.addresses[0])
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    writer.write(hostile_bytes()[name])
    async with asyncio.timeout(5):
        try:
            while await reader.read(1000):
                pass
        except ConnectionResetError:
            pass
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    assert server.parts.directory.links == []
    assert await works(server)


async def test_a_flood_of_silent_connections_is_bounded_and_ends(
    server: Worker,
) -> None:
    url = urlsplit(server.addresses[0])
    pairs = [await asyncio.open_connection(url.hostname, url.port) for _ in range(20)]
    assert await works(server)
    async with asyncio.timeout(5):
        for reader, writer in pairs:
            try:
                while await reader.read(1000):
                    pass
            except ConnectionResetError:
                pass
            writer.close()


async def test_strict_policy_refuses_unexposed_functions() -> None:
    options = Options(policy=Policy.STRICT, allow=(f"{remote.__name__}:add",))
    async with Cluster(2, options=options) as (a, _):
        assert await a.peer("b").call(remote.add, 1) == 2
        for function in (remote.echo, exec, remote.add_async):
            with pytest.raises((RejectedError, asyncrpc.RemoteError), match="expose"):
                await a.peer("b").call(function, "1")
        with pytest.raises(asyncrpc.errors.EncodeError, match=r"pickle|strict|STRICT"):
            await a.peer("b").call(remote.add, remote.Counter())
        assert await a.peer("b").call(remote.add, 1) == 2


async def test_a_trusting_caller_cannot_make_a_strict_callee_unpickle() -> None:
    meeting = LocalRendezvous(2)
    strict = Options(policy=Policy.STRICT, allow=(f"{remote.__name__}:*",))
    a = Worker("a", rank=0, rendezvous=meeting, options=QUICK)
    b = Worker("b", rank=1, rendezvous=meeting, options=strict)
    async with asyncio.TaskGroup() as starting:
        starting.create_task(a.__aenter__())
        starting.create_task(b.__aenter__())
    assert await a.peer("b").call(remote.add, 1) == 2
    with pytest.raises(asyncrpc.CallError, match=r"STRICT|strict|pickle"):
        await a.peer("b").call(remote.echo, Exception.with_traceback)
    with pytest.raises(asyncrpc.CallError, match=r"STRICT|strict|pickle"):
        await a.peer("b").call(remote.echo, remote.Counter())
    assert await a.peer("b").call(remote.add, 1) == 2
    await asyncio.gather(a.shutdown(), b.shutdown())


async def test_a_flooded_callee_rejects_and_recovers() -> None:
    async with Cluster(
        2, options=Options(limits=LimitOptions(inbound_calls_max=4))
    ) as (a, _):
        calls = [a.parts.start_call("b", remote.slow_one) for _ in range(10)]
        found = await asyncio.gather(*calls, return_exceptions=True)
        assert found.count(1) == 4
        rejected = [one for one in found if isinstance(one, RejectedError)]
        assert len(rejected) == 6
        assert rejected[0].outcome is asyncrpc.Outcome.NOT_EXECUTED
        assert await a.peer("b").call(remote.add, 1) == 2


async def test_peer_may_use_half_of_the_call_limit() -> None:
    options = Options(limits=LimitOptions(inbound_calls_max=1000), drain_timeout_s=0.0)
    cluster = ProcessCluster(["b", "c"], method="forkserver", options=options)
    async with cluster as a:
        calls = [a.parts.start_call("b", asyncio.sleep, (3600.0,)) for _ in range(600)]
        await until(lambda: sum(call.done() for call in calls) == 100)
        for call in calls[500:]:
            with pytest.raises(RejectedError, match="one peer's share"):
                await call
        with pytest.raises(RejectedError, match="one peer's share"):
            await a.peer("b").call(remote.add, 1)
        assert await a.peer("c").call(remote.forward, ["b"], remote.add, 1) == 2
        for call in calls[:500]:
            call.cancel()
        served = 0
        async with asyncio.timeout(LIMIT_S):
            while not served:  # some of them may not have ended there yet
                with contextlib.suppress(RejectedError):
                    served = await a.peer("b").call(remote.add, 1)
        assert served == 2
