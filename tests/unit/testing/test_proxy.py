"""A proxy, or a fault in a process, breaks what is named, exactly where it is named."""

from __future__ import annotations

import asyncio
import pickle
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrpc.core.wire.frames import Flags, FrameKind, Hello, data_prefix, prefix
from asyncrpc.errors import UsageError
from asyncrpc.testing.faults import FaultScript, InjectedError
from asyncrpc.testing.proxy import Proxy, Way
from asyncrpc.testing.scanner import HANDSHAKE_BYTES, Conversation

LIMIT_S = 60.0
SHAKE = bytes(HANDSHAKE_BYTES)
HELLO = Hello("a", 1, 0, 2)
CALL = prefix(FrameKind.REQUEST, 1, head=b"head", control=b"control")
PING = prefix(FrameKind.PING, 2)

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Target:
    """A server that keeps its connections for the test."""

    def __init__(self) -> None:
        self.accepted: asyncio.Queue[Stream] = asyncio.Queue()
        self.all: list[Stream] = []

    def accept(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.all.append((reader, writer))
        self.accepted.put_nowait((reader, writer))

    def close(self) -> None:
        for _, writer in self.all:
            writer.transport.abort()


@asynccontextmanager
async def before(target: Target) -> AsyncIterator[Proxy]:
    server = await asyncio.start_server(target.accept, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        async with asyncio.timeout(LIMIT_S), Proxy(f"tcp://127.0.0.1:{port}") as proxy:
            yield proxy
    finally:
        target.close()
        server.close()
        await asyncio.sleep(0)


@asynccontextmanager
async def dialed(proxy: Proxy) -> AsyncIterator[Stream]:
    host, _, port = proxy.address.removeprefix("tcp://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def all_of(reader: asyncio.StreamReader) -> tuple[bytes, bool]:
    """Read to the end; return what came, and whether a reset ended it."""
    received = bytearray()
    try:
        while chunk := await reader.read(1 << 16):
            received += chunk
    except ConnectionResetError:
        return bytes(received), True
    return bytes(received), False


# --- frames --------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 7, 40, 1000])
def test_frame_ends_are_found_in_any_pieces(size: int) -> None:
    payload = b"p" * 100
    frames = [
        (FrameKind.HELLO, prefix(FrameKind.HELLO, control=HELLO.encode())),
        (
            FrameKind.REQUEST,
            prefix(FrameKind.REQUEST, 1, lengths=[60, 40], payload_bytes=100) + payload,
        ),
        (
            FrameKind.RESPONSE,
            prefix(
                FrameKind.RESPONSE,
                1,
                flags=Flags.DEFERRED,
                lengths=[100],
                payload_bytes=100,
            ),
        ),
        (FrameKind.DATA, data_prefix(1, 0, 100) + payload),
        (FrameKind.DROP, prefix(FrameKind.DROP, 1, aux=100)),
        (FrameKind.PING, PING),
    ]
    stream = SHAKE + b"".join(frame for _, frame in frames)
    ends, at = [], len(SHAKE)
    for kind, frame in frames:
        at += len(frame)
        ends.append((at, int(kind)))
    scanner = Conversation({}).scanners[Way.TO_TARGET]
    frames_found = [
        (begin + end, kind)
        for begin in range(0, len(stream), size)
        for end, kind in scanner.scan(memoryview(stream[begin : begin + size]))
    ]
    assert frames_found == ends


@pytest.mark.parametrize("read", range(0, 200, 7))
def test_resumed_connection_continues_inside_a_frame(read: int) -> None:
    """Of three frames the acceptor has read so many bytes; the rest comes again."""
    stream = CALL + PING + CALL
    ends, at = [], 0
    for frame in (CALL, PING, CALL):
        at += len(frame)
        ends.append(at)
    read = min(read, len(stream))
    sessions: dict[int, Conversation] = {}
    meet(sessions, HELLO, HELLO).scanners[Way.TO_TARGET].scan(memoryview(stream))
    (token,) = sessions
    again = meet(sessions, replace(HELLO, resume=token), replace(HELLO, received=read))
    frames_found = again.scanners[Way.TO_TARGET].scan(memoryview(stream[read:] + PING))
    assert [read + end for end, _ in frames_found] == [
        *(end for end in ends if end > read),
        len(stream) + len(PING),
    ]
    assert sessions == {token: again}


def meet(
    sessions: dict[int, Conversation], hello: Hello, answer: Hello
) -> Conversation:
    """Let the handshake of a connection pass."""
    conversation = Conversation(sessions)
    for way, hello_of in zip(Way, (hello, answer), strict=True):
        frame = prefix(FrameKind.HELLO, control=hello_of.encode())
        conversation.scanners[way].scan(memoryview(SHAKE + frame))
    return conversation


def test_malformed_stream_is_passed_without_frames() -> None:
    scanner = Conversation({}).scanners[Way.TO_TARGET]
    assert scanner.scan(memoryview(SHAKE + b"x" * 1000)) == []
    assert scanner.is_lost


# --- passing on ----------------------------------------------------------------------


async def test_bytes_and_ends_pass_both_ways() -> None:
    target = Target()
    async with before(target) as proxy, dialed(proxy) as (near_in, near_out):
        far_in, far_out = await target.accepted.get()
        near_out.write(SHAKE + CALL + PING)
        near_out.write_eof()
        far_out.write(b"an answer")
        far_out.write_eof()
        assert await all_of(far_in) == (SHAKE + CALL + PING, False)
        assert await all_of(near_in) == (b"an answer", False)
        assert proxy.connections == 1
        assert proxy.frames[Way.TO_TARGET] == 2
        assert proxy.kinds[Way.TO_TARGET] == {FrameKind.REQUEST: 1, FrameKind.PING: 1}


@pytest.mark.parametrize("reset", [True, False])
@pytest.mark.parametrize(
    ("frames", "nbytes", "passes"),
    [
        (1, 0, len(SHAKE) + len(CALL)),
        (1, 20, len(SHAKE) + len(CALL) + 20),
        (2, 0, len(SHAKE) + len(CALL) + len(PING)),
        (0, 50, 50),
        (0, len(SHAKE), len(SHAKE)),
    ],
)
@pytest.mark.parametrize("piecewise", [True, False])
async def test_cut_passes_exactly_the_bytes_before_it(
    frames: int, nbytes: int, passes: int, *, reset: bool, piecewise: bool
) -> None:
    stream = SHAKE + CALL + PING + CALL
    target = Target()
    async with before(target) as proxy, dialed(proxy) as (near_in, near_out):
        far_in, far_out = await target.accepted.get()
        cut = proxy.cut_after(Way.TO_TARGET, frames=frames, nbytes=nbytes, reset=reset)
        for size in [1] * len(stream) if piecewise else [len(stream)]:
            near_out.write(stream[:size])
            stream = stream[size:]
            await near_out.drain()
        await cut.happened.wait()
        whole = SHAKE + CALL + PING + CALL
        assert await all_of(far_in) == (whole[:passes], reset)
        assert (await all_of(near_in))[0] == b""
        far_out.close()  # the proxy waits for both ends to close, too
        near_out.close()


async def test_cut_counts_over_connections_and_happens_once() -> None:
    target = Target()
    async with before(target) as proxy:
        cut = proxy.cut_after(Way.TO_TARGET, frames=2)
        with pytest.raises(UsageError):
            proxy.cut_after(Way.TO_TARGET)
        for is_cut in (False, True, False):
            async with dialed(proxy) as (near_in, near_out):
                far_in, far_out = await target.accepted.get()
                near_out.write(SHAKE + CALL)
                assert await far_in.readexactly(len(SHAKE + CALL))
                assert cut.happened.is_set() or not is_cut
                if is_cut:
                    assert await all_of(near_in) == (b"", True)
                else:
                    far_out.write(b"yes")
                    assert await near_in.readexactly(3) == b"yes"


async def test_cut_taken_back_does_not_happen() -> None:
    target = Target()
    async with before(target) as proxy, dialed(proxy) as (_, near_out):
        far_in, _ = await target.accepted.get()
        proxy.spare(proxy.cut_after(Way.TO_TARGET))
        near_out.write(SHAKE)
        assert await far_in.readexactly(len(SHAKE))


async def test_all_connections_are_cut_at_once() -> None:
    target = Target()
    async with before(target) as proxy, dialed(proxy) as first, dialed(proxy) as other:
        for _ in range(2):
            await target.accepted.get()
        assert proxy.open_connections == 2
        assert proxy.cut() == 2
        for reader in (first[0], other[0], target.all[0][0], target.all[1][0]):
            assert await all_of(reader) == (b"", True)


# --- other faults --------------------------------------------------------------------


async def test_refused_client_can_return_to_the_same_address() -> None:
    target = Target()
    async with before(target) as proxy, dialed(proxy) as (_, near_out):
        far_in, _ = await target.accepted.get()
        address = proxy.address
        await proxy.refuse()
        with pytest.raises(ConnectionRefusedError):
            async with dialed(proxy):
                pass
        near_out.write(b"still here")
        assert await far_in.readexactly(10) == b"still here"
        await proxy.accept()
        assert proxy.address == address
        async with dialed(proxy):
            await target.accepted.get()


async def test_partition_holds_back_bytes_and_ends_until_it_heals() -> None:
    target = Target()
    async with before(target) as proxy, dialed(proxy) as (_, near_out):
        far_in, _ = await target.accepted.get()
        proxy.partition()
        near_out.write(b"held back")
        near_out.write_eof()
        async with dialed(proxy):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(far_in.read(1), 0.05)
            assert target.accepted.empty()
            proxy.heal()
            assert await all_of(far_in) == (b"held back", False)
            await target.accepted.get()


async def test_delay_is_shared_by_simultaneous_bytes() -> None:
    target = Target()
    async with before(target) as proxy, dialed(proxy) as (_, near_out):
        far_in, _ = await target.accepted.get()
        proxy.delay(0.2)
        clock = asyncio.get_running_loop().time
        begun_s = clock()
        near_out.write(b"x" * (1 << 20))
        await far_in.readexactly(1 << 20)
        assert clock() - begun_s >= 0.2


async def test_throttle_limits_bytes_per_second() -> None:
    target = Target()
    async with before(target) as proxy, dialed(proxy) as (_, near_out):
        far_in, _ = await target.accepted.get()
        proxy.throttle(100_000)
        clock = asyncio.get_running_loop().time
        begun_s = clock()
        near_out.write(b"x" * 20_000)
        await far_in.readexactly(20_000)
        assert clock() - begun_s >= 0.18  # the last of 20 pieces has no pause before it


async def test_dialer_is_cut_off_where_no_target_listens() -> None:
    target = Target()
    async with before(target) as proxy:
        proxy.target = type(proxy.target)("tcp", "127.0.0.1", 1)
        async with dialed(proxy) as (near_in, _):
            assert await all_of(near_in) == (b"", True)


async def test_unix_sockets_are_proxied_too(tmp_path: Path) -> None:
    target = Target()
    server = await asyncio.start_unix_server(target.accept, tmp_path / "target")
    listen = f"uds://{tmp_path}/proxy"
    async with Proxy(f"uds://{tmp_path}/target", listen=listen) as proxy:
        reader, writer = await asyncio.open_unix_connection(tmp_path / "proxy")
        far_in, _ = await target.accepted.get()
        cut = proxy.cut_after(Way.TO_TARGET, nbytes=3)
        writer.write(b"four")
        await cut.happened.wait()
        assert (await all_of(far_in))[0] == b"fou"
        assert (await all_of(reader))[0] == b""
        writer.transport.abort()
    target.close()
    server.close()
    await asyncio.sleep(0)
    assert not (tmp_path / "proxy").exists()


def test_memory_transport_has_no_proxy() -> None:
    with pytest.raises(UsageError, match="mem://a"):
        Proxy("mem://a")


def test_fault_strikes_the_named_point_only() -> None:
    faults = FaultScript()
    faults.at(rank=2, step=5).fail("disk full")
    faults.reached(rank=2, step=4)
    faults.reached(rank=1, step=5)
    with pytest.raises(InjectedError, match="disk full"):
        faults.reached(rank=2, step=5)


def test_fault_script_can_be_pickled() -> None:
    faults = FaultScript()
    faults.at(rank=0, step=0).fail("there too")
    with pytest.raises(InjectedError, match="there too"):
        pickle.loads(pickle.dumps(faults)).reached(rank=0, step=0)


def test_point_has_one_fault_at_most() -> None:
    faults = FaultScript()
    faults.at(rank=0, step=1).kill()
    with pytest.raises(UsageError, match="rank 0 already has a fault at step 1"):
        faults.at(rank=0, step=1)


@pytest.mark.parametrize(
    ("fault", "status"), [("kill()", -signal.SIGKILL), ("exit(3)", 3)]
)
def test_process_ends_as_its_script_says(fault: str, status: int) -> None:
    program = (
        "from asyncrpc.testing.faults import FaultScript as Script\n"
        f"script = Script(); script.at(rank=0, step=0).{fault}\n"
        "script.reached(rank=0, step=0)"
    )
    ended = subprocess.run([sys.executable, "-c", program], check=False, timeout=300)
    assert ended.returncode == status
