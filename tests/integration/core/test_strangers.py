"""Who does not know the secret or breaks the protocol is told, and hurts nobody."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import msgpack
import pytest

from asyncrpc import NetworkOptions, Options, Policy, Worker
from asyncrpc.core.logs import LINES_AT_ONCE, PEERS_MAX
from asyncrpc.core.serde import Codec, FunctionTable
from asyncrpc.core.wire.frames import HEADER, MAGIC, VERSION, Flags, FrameKind, prefix
from asyncrpc.core.wire.handshake import PREFACE, PROOF_BYTES, REFUSAL, Handshake, Role
from asyncrpc.errors import AsyncRpcError, AuthenticationError
from tests.docs.test_wire_tables import MESSAGES
from tests.integration.core import remote
from tests.integration.core.groups import alone, until
from tests.integration.core.raw_connections import dialed, hello, prove, read_to_the_end

SECRET = "the right one of many"
WITHOUT_PAYLOAD = [
    names for names, message in MESSAGES.items() if not message.record.holds_buffers
]
QUICK = Options(
    secret=SECRET,
    network=NetworkOptions(connect_timeout_s=5.0, handshake_timeout_s=0.4),
    drain_timeout_s=0.5,
)


@pytest.fixture(params=["tcp", "uds"])
def listens(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "tcp://127.0.0.1:0" if request.param == "tcp" else f"uds://{tmp_path}/ps"


@pytest.fixture
async def server(listens: str) -> AsyncIterator[Worker]:
    options = replace(QUICK, network=replace(QUICK.network, listen=(listens,)))
    async with alone("ps", options) as worker:
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
    options = replace(
        QUICK,
        secret=secret,
        network=replace(QUICK.network, listen=(f"uds://{folder}/{name}",)),
    )
    return Worker(name, rendezvous=where, options=options)


async def is_served(server: Worker, folder: Path) -> bool:
    async with caller(server, folder, SECRET, "newcomer") as newcomer:
        return bool(await newcomer.peer("ps").call(remote.add, 1) == 2)


# --- secrets -------------------------------------------------------------------------


ADVICE = "give both the same ASYNCRPC_SECRET or Options(secret=...)"
DIFFERENT = f"the two workers have different secrets; {ADVICE}"


@pytest.mark.parametrize(
    ("secret", "said", "logged"),
    [
        (
            "a wrong one of many",
            f"the peer refused our proof: {DIFFERENT}",
            f"the peer's proof is wrong: {DIFFERENT}",
        ),
        (
            None,
            (
                "the peer demands a secret and this worker has none; set "
                "ASYNCRPC_SECRET or Options(secret=...) to the cluster's"
            ),
            (
                "the peer has no secret and this worker demands one; give it the same "
                "ASYNCRPC_SECRET or Options(secret=...)"
            ),
        ),
    ],
    ids=["wrong", "none"],
)
async def test_worker_with_a_wrong_secret_is_told_and_not_served(  # noqa: PLR0917
    server: Worker,
    friend: Worker,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    secret: str | None,
    said: str,
    logged: str,
) -> None:
    async with caller(server, tmp_path, secret, "stranger") as stranger:
        for _ in range(2):
            with pytest.raises(AuthenticationError) as caught:
                await stranger.peer("ps").call(remote.add, 1)
            assert str(caught.value).endswith(f": {said}")
        assert stranger.parts.directory.links == []
        assert stranger.counters.authentications_failed == 2
        await until(lambda: server.counters.authentications_failed == 2)
    first = caplog.records[0].getMessage()  # the second of a second is only counted
    assert first.startswith("worker 'ps' refused a connection: ")
    assert first.endswith(f": {logged}")
    assert [link.peer.name for link in server.parts.directory.links] == ["friend"]
    assert await is_served(server, tmp_path)


async def test_worker_without_a_secret_names_the_peer_with_one(tmp_path: Path) -> None:
    where = {"a": f"uds://{tmp_path}/a", "b": f"uds://{tmp_path}/b"}
    options = {
        name: Options(network=NetworkOptions(listen=(where[name],))) for name in where
    }
    options["a"] = replace(options["a"], secret=SECRET)
    a, b = (Worker(name, rendezvous=where, options=options[name]) for name in where)
    async with a, b:
        with pytest.raises(AuthenticationError, match="the peer has no secret"):
            await a.peer("b").call(remote.add, 1)


# --- proofs of others ----------------------------------------------------------------


async def test_recorded_handshake_is_refused(server: Worker, friend: Worker) -> None:
    """Byte for byte what one who knows the secret has said, said again."""
    recorded = bytearray()
    dialer = Handshake(Role.DIALER, SECRET.encode(), os.urandom(32))
    async with dialed(server) as (reader, writer):
        said = dialer.start()
        writer.write(said)
        while dialer.wanted:
            recorded += said
            said = dialer.receive(await reader.readexactly(dialer.wanted))
            writer.write(said)
        writer.write(hello())
        recorded += hello()
        assert (await reader.readexactly(2)) == MAGIC  # its HELLO: that was taken
    async with dialed(server) as (reader, writer):
        writer.write(recorded)
        answer = await read_to_the_end(reader)
    assert answer[-len(REFUSAL) :] == REFUSAL
    assert len(answer) == PREFACE.size + len(REFUSAL)
    await until(lambda: server.counters.authentications_failed == 1)


async def test_proof_relayed_by_a_false_listener_is_refused(
    server: Worker, friend: Worker, tmp_path: Path
) -> None:
    """A listener at a stale address gets a proof for its own nonce alone."""
    heard: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def listen(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        preface = await reader.readexactly(PREFACE.size)
        writer.write(PREFACE.pack(b"ARPC", VERSION, 1, 0, os.urandom(32)))
        heard.set_result(preface + await reader.readexactly(PROOF_BYTES))
        writer.close()

    path = tmp_path / "false"
    listener = await asyncio.start_unix_server(listen, path)
    where = {"me": f"uds://{tmp_path}/me", "ps": f"uds://{path}"}
    options = replace(QUICK, network=replace(QUICK.network, listen=(where["me"],)))
    async with Worker("me", rendezvous=where, options=options) as me:
        calling = asyncio.create_task(_fails(me))
        recorded = await heard
        listener.close()
        await calling
    async with dialed(server) as (reader, writer):
        writer.write(recorded)
        assert (await read_to_the_end(reader)).endswith(REFUSAL)
    await until(lambda: server.counters.authentications_failed == 1)


async def _fails(caller: Worker) -> None:
    with pytest.raises(AsyncRpcError):
        await caller.peer("ps").call(remote.add, 1)


async def test_echoed_handshake_is_refused(tmp_path: Path) -> None:
    """Somebody at the address says back whatever is said."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while some := await reader.read(4096):
            writer.write(some)
        writer.close()

    path = tmp_path / "echo"
    listener = await asyncio.start_unix_server(echo, path)
    where = {"me": f"uds://{tmp_path}/me", "ps": f"uds://{path}"}
    options = replace(QUICK, network=replace(QUICK.network, listen=(where["me"],)))
    async with Worker("me", rendezvous=where, options=options) as me:
        with pytest.raises(AuthenticationError, match="repeats our own nonce"):
            await me.peer("ps").call(remote.add, 1)
        assert me.counters.authentications_failed == 1
    listener.close()


# --- users of this host --------------------------------------------------------------

OTHER_UID = 65534


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as exit_stack:
        yield exit_stack


# Python's own modules only, and imported before it becomes the other user, who may not
# be able to read them.
KNOCK = """
import hashlib, hmac, os, socket, sys
path, uid, *records = sys.argv[1:]
preface, hello = map(bytes.fromhex, records)
os.setuid(int(uid))
sock = socket.socket(socket.AF_UNIX)
sock.connect(path)
sock.sendall(preface)
answer = sock.recv(40, socket.MSG_WAITALL)
label = b"asyncrpc dialer\\0"
sock.sendall(hmac.digest(b"", label + preface + answer, "sha256") + hello)
print(sock.recv(34, socket.MSG_WAITALL)[32:].hex())
"""


def open_to_all(folder: Path, path: Path) -> None:
    """Let every user of this host connect, as far as files are concerned."""
    folder.chmod(0o711)
    path.chmod(0o666)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("uid", [0, OTHER_UID])
async def test_kernel_credentials_identify_the_dialer(
    uid: int, caplog: pytest.LogCaptureFixture, stack: contextlib.ExitStack
) -> None:
    """The files would let another user in."""
    home = Path(stack.enter_context(TemporaryDirectory()))
    options = replace(
        QUICK, secret=None, network=replace(QUICK.network, listen=(f"uds://{home}/ps",))
    )
    async with alone("ps", options) as server:
        open_to_all(home, home / "ps")
        preface = PREFACE.pack(b"ARPC", VERSION, 0, 0, os.urandom(32))
        knocking = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-c", KNOCK, str(home / "ps"), str(uid)),
            *(preface.hex(), hello().hex()),
            stdout=asyncio.subprocess.PIPE,
        )
        answer, _ = await knocking.communicate()
        assert answer.strip() == (b"" if uid else MAGIC.hex().encode())
        await until(lambda: server.counters.authentications_failed == bool(uid))
        assert len(server.parts.directory.links) == (0 if uid else 1)
    words = f"the peer runs as user {uid}, this worker as 0"
    assert (words in caplog.text) is bool(uid)


# --- bytes ---------------------------------------------------------------------------


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
    "nothing": b"",
    "zeros": bytes(4096),
    "ones": b"\xff" * 4096,
    "our magic, another version": b"ARPC\xff" + bytes(200),
    "our magic, a huge length": b"ARPC\x02" + (1 << 62).to_bytes(8, "little") * 40,
}
NOTHING = Codec(FunctionTable(Policy.TRUSTED), None).encode([[], {}]).control
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
    "garbage": hello() + os.urandom(4096),
}


@pytest.mark.parametrize("what", UNPROVED)
async def test_bytes_of_strangers_end_their_link(
    server: Worker, friend: Worker, what: str
) -> None:
    async with dialed(server) as (reader, writer):
        writer.write(UNPROVED[what])
        await read_to_the_end(reader)
    assert [link.peer.name for link in server.parts.directory.links] == ["friend"]


@pytest.mark.parametrize("what", PROVED)
async def test_a_peer_that_breaks_the_protocol_is_cut_off(
    server: Worker, friend: Worker, what: str
) -> None:
    async with dialed(server) as stream:
        await prove(stream, SECRET)
        stream[1].write(PROVED[what])
        await read_to_the_end(stream[0])
    assert [link.peer.name for link in server.parts.directory.links] == ["friend"]


@pytest.mark.parametrize(("service", "method"), [("x", "y"), ("rounds", "arrivals")])
async def test_notice_of_an_unknown_service_or_form_is_dropped(
    server: Worker,
    friend: Worker,
    service: str,
    method: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    head = msgpack.packb([service, method])
    async with dialed(server) as stream:
        await prove(stream, SECRET)
        notice = prefix(FrameKind.NOTICE, head=head, control=b"\xc0")
        # What comes after it is read: that is what ends the connection.
        stream[1].write(hello() + notice + frame(99, lengths=(0, 0, 0)))
        await read_to_the_end(stream[0])
    assert f"could not be taken: {service}.{method}" in caplog.text


@pytest.mark.parametrize("connections", [1, 300])
async def test_a_peer_cannot_fill_the_log(
    server: Worker, friend: Worker, connections: int, caplog: pytest.LogCaptureFixture
) -> None:
    """By notices that cannot be taken, and by breaking the protocol again and again."""
    notice = prefix(FrameKind.NOTICE, head=msgpack.packb(["x", "y"]), control=b"\xc0")
    said = notice * (9000 // connections) + frame(99, lengths=(0, 0, 0))
    begun_s = asyncio.get_running_loop().time()
    for _ in range(connections):
        async with dialed(server) as stream:
            await prove(stream, SECRET)
            stream[1].write(hello() + said)
            await read_to_the_end(stream[0])
    took_s = asyncio.get_running_loop().time() - begun_s
    lines = Counter((record.pathname, record.lineno) for record in caplog.records)
    assert LINES_AT_ONCE <= max(lines.values()) <= LINES_AT_ONCE + PEERS_MAX + took_s


async def test_payload_of_a_message_without_one_is_refused_early(
    server: Worker, friend: Worker
) -> None:
    for service, kind, method in WITHOUT_PAYLOAD:
        async with dialed(server) as stream:
            await prove(stream, SECRET)
            announced = prefix(
                FrameKind[kind],
                1,
                flags=Flags.DEFERRED,
                aux=-1 if kind == "SERVICE" else 0,
                head=msgpack.packb([service, method]),
                control=b"\0\xc0",
                lengths=[1 << 30],
                payload_bytes=1 << 30,
            )
            stream[1].write(hello() + announced)
            said = await read_to_the_end(stream[0])
        assert f"{service}.{method}', which takes none".encode() in said


async def test_hello_for_another_is_refused(server: Worker, friend: Worker) -> None:
    async with dialed(server) as stream:
        await prove(stream, SECRET)
        stream[1].write(hello(expects="another"))
        read = await read_to_the_end(stream[0])
    assert b"this is worker 'ps', not 'another'" in read


async def test_slow_handshake_is_cut_off(server: Worker, friend: Worker) -> None:
    """Whether he says nothing, or a byte now and then."""
    async with dialed(server) as silent, dialed(server) as slow:

        async def drip() -> None:
            for byte in PREFACE.pack(b"ARPC", VERSION, 1, 0, bytes(32)):
                slow[1].write(bytes([byte]))
                await asyncio.sleep(0.05)

        dripping = asyncio.create_task(drip())
        await read_to_the_end(silent[0])
        await read_to_the_end(slow[0])
        dripping.cancel()
        await asyncio.wait([dripping])


async def test_silent_connections_are_limited(listens: str, tmp_path: Path) -> None:
    options = replace(
        QUICK,
        network=replace(QUICK.network, listen=(listens,), handshake_timeout_s=60),
        limits=replace(QUICK.limits, handshakes_max=4),
    )
    async with alone("ps", options) as server, contextlib.AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(dialed(server)) for _ in range(8)]
        reads = [
            asyncio.create_task(read_to_the_end(connection[0]))
            for connection in streams
        ]
        for ended in asyncio.as_completed(reads):
            await ended
            if sum(read.done() for read in reads) == 4:
                break
        assert sum(read.done() for read in reads) == 4
        for stream in streams:
            stream[1].close()
        await asyncio.wait(reads)
        assert await is_served(server, tmp_path)
