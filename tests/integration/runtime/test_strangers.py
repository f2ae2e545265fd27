"""Who does not know the secret or breaks the protocol is told, and hurts nobody."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import msgpack
import pytest

import asyncrpc
from asyncrpc import AuthenticationError, LocalRendezvous, Options, Policy, Worker
from asyncrpc.serde import Codec, FunctionTable
from asyncrpc.testing import Cluster
from asyncrpc.wire.frames import HEADER, MAGIC, VERSION, FrameKind, prefix
from asyncrpc.wire.handshake import NONCE_BYTES, PREFACE, Handshake, Role
from asyncrpc.wire.messages import Hello
from tests.integration.runtime import remote
from tests.integration.runtime.groups import LIMIT_S

SECRET = "the right one"
QUICK = Options(secret=SECRET, connect_timeout_s=0.4, drain_timeout_s=0.5)
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture(params=["tcp", "uds"])
def listens(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "tcp://127.0.0.1:0" if request.param == "tcp" else f"uds://{tmp_path}/ps"


@pytest.fixture
async def server(listens: str) -> AsyncIterator[Worker]:
    options = replace(QUICK, listen=(listens,))
    where = LocalRendezvous(1)
    async with Worker("ps", rank=0, rendezvous=where, options=options) as worker:
        yield worker


@pytest.fixture
async def friend(server: Worker, tmp_path: Path) -> AsyncIterator[Worker]:
    """A worker that was connected before anything else happened."""
    async with caller(server, tmp_path, SECRET) as worker:
        assert await worker.peer("ps").call(remote.add, 1) == 2
        yield worker
        assert await worker.peer("ps").call(remote.add, 1) == 2


def caller(
    server: Worker, folder: Path, secret: str | None, name: str = "friend"
) -> Worker:
    where = {name: "uds://nobody-calls-it", "ps": server.addresses}
    options = replace(QUICK, secret=secret, listen=(f"uds://{folder}/{name}",))
    return Worker(name, rendezvous=where, options=options)


async def is_served(server: Worker, folder: Path) -> bool:
    async with caller(server, folder, SECRET, "newcomer") as newcomer:
        return bool(await newcomer.peer("ps").call(remote.add, 1) == 2)


# --- secrets -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("secret", "words"),
    [
        ("a wrong one", "the two workers have different secrets; give both the same"),
        (None, "the peer demands a secret and this worker has none"),
    ],
)
async def test_who_does_not_know_the_secret_is_told_and_not_served(
    server: Worker, friend: Worker, tmp_path: Path, secret: str | None, words: str
) -> None:
    async with caller(server, tmp_path, secret, "stranger") as stranger:
        for _ in range(2):
            with pytest.raises(AuthenticationError, match=words) as caught:
                await stranger.peer("ps").call(remote.add, 1)
            assert "ASYNCRPC_SECRET" in str(caught.value)
        assert stranger.directory.links == []
    assert [link.peer.name for link in server.directory.links] == ["friend"]
    assert await is_served(server, tmp_path)


async def test_a_worker_without_a_secret_tells_who_has_one(tmp_path: Path) -> None:
    where = {"a": f"uds://{tmp_path}/a", "b": f"uds://{tmp_path}/b"}
    options = {name: Options(listen=(where[name],)) for name in where}
    options["a"] = replace(options["a"], secret=SECRET)
    a, b = (Worker(name, rendezvous=where, options=options[name]) for name in where)
    async with a, b:
        with pytest.raises(AuthenticationError, match="the peer has no secret"):
            await a.peer("b").call(remote.add, 1)


# --- bytes ---------------------------------------------------------------------------


@asynccontextmanager
async def dialed(server: Worker) -> AsyncIterator[Stream]:
    url = urlsplit(server.addresses[0])
    if url.scheme == "uds":
        reader, writer = await asyncio.open_unix_connection(url.path)
    else:
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def read_to_the_end(reader: asyncio.StreamReader) -> bytes:
    """Read until the worker closes the connection: it has to, within the limit."""
    read = bytearray()
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(LIMIT_S):
            while some := await reader.read(4096):
                read += some
    return bytes(read)


async def prove(stream: Stream) -> None:
    """Go through the handshake, as one who knows the secret."""
    reader, writer = stream
    handshake = Handshake(Role.DIALER, SECRET.encode(), os.urandom(NONCE_BYTES))
    writer.write(handshake.start())
    while handshake.wanted:
        writer.write(handshake.receive(await reader.readexactly(handshake.wanted)))


def hello(name: str = "raw", expects: str = "ps") -> bytes:
    record = Hello(name=name, incarnation=7, rank=-1, pid=1, expects=expects)
    return prefix(FrameKind.HELLO, control=record.encode())


def frame(kind: int, *, version: int = VERSION, lengths: tuple[int, int, int]) -> bytes:
    """Return a header that announces (control bytes, buffers, payload bytes)."""
    control, buffers, payload = lengths
    return HEADER.pack(MAGIC, version, kind, 0, 0, control, buffers, 0, 1, payload)


UNPROVED = {
    "garbage": os.urandom(4096),
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "another version": PREFACE.pack(b"ARPC", VERSION + 1, 1, 0, os.urandom(32)),
    "no secret": PREFACE.pack(b"ARPC", VERSION, 0, 0, os.urandom(32)),
    "a wrong proof": PREFACE.pack(b"ARPC", VERSION, 1, 0, os.urandom(32)) + bytes(32),
}
NOTHING = Codec(FunctionTable(Policy.TRUSTED), None).encode([[], {}]).control
HEAD = msgpack.packb(["barrier", "here"])
PROVED = {
    "no hello": prefix(FrameKind.PING),
    "a huge hello": frame(FrameKind.HELLO, lengths=(0xFFFF_FFFF, 0, 0)),
    "a hello of garbage": prefix(FrameKind.HELLO, control=b"\xc1" * 40),
    "a second hello": hello() * 2,
    "a huge control": hello() + frame(FrameKind.REQUEST, lengths=(0xFFFF_FFFF, 0, 0)),
    "a huge payload": hello() + frame(FrameKind.REQUEST, lengths=(0, 1, 1 << 62)),
    "many buffers": hello() + frame(FrameKind.REQUEST, lengths=(0, 0xFFFF_FFFF, 0)),
    "a later version": hello()
    + frame(FrameKind.PING, version=VERSION + 1, lengths=(0, 0, 0)),
    "a kind that is none": hello() + frame(99, lengths=(0, 0, 0)),
    "an answer to nothing": hello() + prefix(FrameKind.RESPONSE, 5, control=b"\xc0"),
    "a number that names nothing": hello()
    + prefix(FrameKind.REQUEST, 1, aux=-1, head=msgpack.packb([3]), control=NOTHING),
    "a service that is none": hello()
    + prefix(FrameKind.NOTICE, head=msgpack.packb(["x", "y"]), control=b"\xc0"),
    "a notice of another form": hello()
    + prefix(FrameKind.NOTICE, head=HEAD, control=b"\xc0"),
    "garbage": hello() + os.urandom(4096),
}


@pytest.mark.parametrize("what", UNPROVED)
async def test_bytes_of_strangers_end_their_connection_only(
    server: Worker, friend: Worker, what: str
) -> None:
    async with dialed(server) as (reader, writer):
        writer.write(UNPROVED[what])
        await read_to_the_end(reader)
    assert [link.peer.name for link in server.directory.links] == ["friend"]


@pytest.mark.parametrize("what", PROVED)
async def test_a_peer_that_breaks_the_protocol_is_cut_off(
    server: Worker, friend: Worker, what: str
) -> None:
    async with dialed(server) as stream:
        await prove(stream)
        stream[1].write(PROVED[what])
        await read_to_the_end(stream[0])
    assert [link.peer.name for link in server.directory.links] == ["friend"]


async def test_a_hello_to_somebody_else_is_refused(
    server: Worker, friend: Worker
) -> None:
    async with dialed(server) as stream:
        await prove(stream)
        stream[1].write(hello(expects="another"))
        read = await read_to_the_end(stream[0])
    assert b"this is worker 'ps', not 'another'" in read


async def test_who_is_slow_to_introduce_himself_is_cut_off(
    server: Worker, friend: Worker
) -> None:
    """Whether he says nothing, or a byte now and then."""
    async with dialed(server) as silent, dialed(server) as slow:
        begun_s = asyncio.get_running_loop().time()

        async def drip() -> None:
            for byte in PREFACE.pack(b"ARPC", VERSION, 1, 0, bytes(32)):
                slow[1].write(bytes([byte]))
                await asyncio.sleep(0.05)

        dripping = asyncio.create_task(drip())
        await read_to_the_end(silent[0])
        await read_to_the_end(slow[0])
        took_s = asyncio.get_running_loop().time() - begun_s
        dripping.cancel()
        await asyncio.wait([dripping])
    assert 0.3 < took_s < 0.4 + 1.5


async def test_of_those_who_are_silent_only_so_many_are_kept(
    listens: str, tmp_path: Path
) -> None:
    options = replace(QUICK, listen=(listens,), handshakes_max=4, connect_timeout_s=5)
    where = LocalRendezvous(1)
    async with (
        Worker("ps", rank=0, rendezvous=where, options=options) as server,
        contextlib.AsyncExitStack() as stack,
    ):
        streams = [await stack.enter_async_context(dialed(server)) for _ in range(8)]
        reads = [asyncio.create_task(read_to_the_end(one[0])) for one in streams]
        for ended in asyncio.as_completed(reads):
            await ended
            if sum(read.done() for read in reads) == 4:
                break
        assert sum(read.done() for read in reads) == 4
        for stream in streams:
            stream[1].close()
        await asyncio.wait(reads)
        assert await is_served(server, tmp_path)


# --- the strict policy ---------------------------------------------------------------


@asyncrpc.expose
def exposed(value: object = 1) -> object:
    return value


@pytest.fixture
async def lenient_and_strict() -> AsyncIterator[tuple[Worker, Worker]]:
    meeting = LocalRendezvous(2)
    lenient = Worker("lenient", rank=0, rendezvous=meeting)
    options = Options(policy=Policy.STRICT)
    strict = Worker("strict", rank=1, rendezvous=meeting, options=options)
    async with asyncio.TaskGroup() as starting:
        starting.create_task(lenient.__aenter__())
        starting.create_task(strict.__aenter__())
    yield lenient, strict
    await asyncio.gather(lenient.shutdown(), strict.shutdown())


@pytest.fixture
def bait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module that could be imported, and is not."""
    (tmp_path / "bait_for_imports.py").write_text("def run(): pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("bait_for_imports")
    del sys.modules["bait_for_imports"]
    return module


async def test_what_is_exposed_can_be_called_and_nothing_else(
    lenient_and_strict: tuple[Worker, Worker],
) -> None:
    strict = lenient_and_strict[0].peer("strict")
    assert await strict.call(exposed, [1, "a"]) == [1, "a"]
    refused: list[Any] = [remote.echo, os.getpid, print, remote.Counter]
    for function in refused:
        with pytest.raises(asyncrpc.RejectedError, match="whose policy is strict"):
            await strict.call(function)
    assert await strict.call(exposed) == 1


async def test_a_strict_worker_imports_nothing_on_a_peers_word(
    lenient_and_strict: tuple[Worker, Worker], bait: ModuleType
) -> None:
    lenient, _ = lenient_and_strict
    sys.modules["bait_for_imports"] = bait
    lenient.functions.name_of(bait.run)  # so that it is known by its name there
    del sys.modules["bait_for_imports"]
    for function, args in ((bait.run, ()), (exposed, (bait.run,))):
        with pytest.raises(asyncrpc.CallError) as caught:
            await lenient.peer("strict").call(function, *args)
        assert caught.value.outcome is asyncrpc.Outcome.NOT_EXECUTED
        assert "bait_for_imports" not in sys.modules
    assert await lenient.peer("strict").call(exposed) == 1


async def test_a_trusting_worker_does_import(bait: ModuleType) -> None:
    """So the test above can tell."""
    async with Cluster(2) as (a, _):
        sys.modules["bait_for_imports"] = bait
        a.functions.name_of(bait.run)
        del sys.modules["bait_for_imports"]
        assert await a.peer("b").call(bait.run) is None
        assert sys.modules.pop("bait_for_imports", None) is not None
