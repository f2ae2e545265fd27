"""A peer that asks for much and reads nothing: what it costs, and whom."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Iterator

import msgpack
import pytest
import torch

import asyncrpc
from asyncrpc import LimitOptions, NetworkOptions, Options, Worker
from asyncrpc.core.wire.frames import HEADER_BYTES, Flags, FrameKind, prefix
from asyncrpc.testing import Cluster
from asyncrpc.testing.cluster import Wires
from tests.integration.core.company import PATIENT
from tests.integration.core.groups import LIMIT_S, alone, until
from tests.integration.core.raw_connections import Stream, dialed, hello, prove

SECRET = "a secret of those inside"
LIMIT_BYTES = 32 << 20
ITEM_BYTES = 128 << 10
CALLS = 200
THREADS = 4
MADE = 0


def item() -> torch.Tensor:
    global MADE  # noqa: PLW0603  (functions of calls have no other place)
    MADE += 1
    return torch.zeros(ITEM_BYTES, dtype=torch.uint8)


@asyncrpc.expose
async def tensors(count: int) -> AsyncIterator[torch.Tensor]:
    for _ in range(count):
        yield item()


@asyncrpc.expose
def tensors_of_a_thread(count: int) -> Iterator[torch.Tensor]:
    for _ in range(count):
        yield item()


@asyncrpc.expose
async def tensor() -> torch.Tensor:
    return item()


@asyncrpc.expose
def tensor_of_a_thread() -> torch.Tensor:
    return item()


@asyncrpc.expose
def text() -> str:
    item()
    return "x" * ITEM_BYTES


@asyncrpc.expose
async def small() -> str:
    return "small"


@asyncrpc.expose
def small_of_a_thread() -> str:
    return "small"


@pytest.fixture
async def server() -> AsyncIterator[Worker]:
    global MADE  # noqa: PLW0603
    MADE = 0
    options = Options(
        secret=SECRET,
        policy=asyncrpc.Policy.STRICT,
        threads=THREADS,
        drain_timeout_s=1.0,
        limits=LimitOptions(outbound_bytes_max=LIMIT_BYTES),
        network=NetworkOptions(listen=("tcp://127.0.0.1:0",)),
    )
    async with alone("ps", options) as worker:
        yield worker


def request(function: str, call_id: int, *args: int) -> bytes:
    return prefix(
        FrameKind.REQUEST,
        call_id,
        aux=-1,
        flags=int(Flags.STREAM) if function.startswith("tensors") else 0,
        head=msgpack.packb([[0, f"{__name__}:{function}"], None]),
        control=struct.pack("<I", 0) + msgpack.packb([list(args), {}]),
    )


async def frame(reader: asyncio.StreamReader) -> tuple[int, int]:
    """Read a frame; return its kind and its call."""
    opening = await reader.readexactly(HEADER_BYTES)
    head, control, count = struct.unpack_from("<HII", opening, 6)
    call_id, payload = struct.unpack_from("<QQ", opening, 24)
    flags = struct.unpack_from("<H", opening, 4)[0]
    is_deferred = bool(flags & Flags.DEFERRED) and opening[3] != FrameKind.DATA
    rest = head + control + 8 * count + (0 if is_deferred else payload)
    await reader.readexactly(rest)
    return opening[3], call_id


async def enter(stream: Stream) -> None:
    await prove(stream, SECRET)
    stream[1].write(hello())
    kind, _ = await frame(stream[0])
    assert kind == FrameKind.HELLO
    stream[1].write(prefix(FrameKind.ACK))


async def ask_in_turn(server: Worker) -> None:
    """Go through each thread of the worker several times, as another caller."""
    options = Options(secret=SECRET, policy=asyncrpc.Policy.STRICT)
    where = {"me": "tcp://127.0.0.1:0", "ps": server.addresses[0]}
    async with Worker("me", rendezvous=where, options=options) as me:
        for _ in range(20):
            asked = [me.peer("ps").call(small_of_a_thread) for _ in range(2 * THREADS)]
            await asyncio.gather(*asked)


@pytest.mark.parametrize(
    "function", ["tensors", "tensors_of_a_thread", "tensor", "tensor_of_a_thread"]
)
async def test_answers_pause_for_an_idle_reader(server: Worker, function: str) -> None:
    args = (1000,) if function.startswith("tensors") else ()
    async with dialed(server) as stream:
        await enter(stream)
        for call_id in range(1, CALLS + 1):
            stream[1].write(request(function, call_id, *args))
        (link,) = server.parts.directory.links
        await until(lambda: link.responder.backlog.is_pressed)
        # Whoever else asks is served meanwhile, so that what could be made has been.
        await ask_in_turn(server)
        made_before, kept = MADE, link.count_kept()
        for call_id in range(CALLS + 1, 2 * CALLS + 1):
            stream[1].write(request(function, call_id, *args))
        await until(lambda: link.served.get(2 * CALLS) is not None)
        await ask_in_turn(server)
        assert made_before == MADE
        assert link.count_kept() < kept + ITEM_BYTES  # signs of life are sent


async def test_waiting_answers_continue_once_the_peer_reads(server: Worker) -> None:
    async with dialed(server) as stream:
        reader, writer = stream
        await enter(stream)
        (link,) = server.parts.directory.links
        for call_id in range(1, CALLS + 1):
            writer.write(request("text", call_id))
        await until(lambda: link.responder.backlog.is_pressed)
        answered: set[int] = set()
        read_bytes = 0
        async with asyncio.timeout(LIMIT_S):
            while len(answered) < CALLS:
                kind, call_id = await frame(reader)
                if kind == FrameKind.RESPONSE:
                    answered.add(call_id)
                    read_bytes += ITEM_BYTES
                    writer.write(prefix(FrameKind.ACK, aux=read_bytes))
        assert not link.served


async def test_calls_of_other_peers_continue(server: Worker) -> None:
    options = Options(secret=SECRET, policy=asyncrpc.Policy.STRICT)
    where = {"me": "tcp://127.0.0.1:0", "ps": server.addresses[0]}
    async with (
        dialed(server) as stream,
        Worker("me", rendezvous=where, options=options) as me,
    ):
        await enter(stream)
        for call_id in range(1, CALLS + 1):
            stream[1].write(request("tensor", call_id))
        (link,) = server.parts.directory.links
        await until(lambda: link.responder.backlog.is_pressed)
        for _ in range(40):
            await me.peer("ps").call(tensor)
            assert await me.peer("ps").call(small) == "small"
        stream[1].write(request("small", CALLS + 1))  # nor do its own small ones wait
        await until(lambda: link.served.get(CALLS + 1) is None)


@asyncrpc.expose
def large() -> torch.Tensor:
    return torch.zeros(LIMIT_BYTES, dtype=torch.uint8)


@pytest.mark.parametrize("network", ["uds", "tcp", "mem"])
async def test_answers_over_the_limit_of_a_peer_follow_in_turn(network: Wires) -> None:
    """Once one has been copied to shared memory, next to nothing is left to take."""
    limits = LimitOptions(outbound_bytes_max=LIMIT_BYTES)
    options = Options(limits=limits, liveness=PATIENT)
    async with Cluster(2, network=network, options=options) as (me, _):
        async with asyncio.timeout(LIMIT_S):
            for _ in range(10):
                assert len(await me.peer("b").call(large)) == LIMIT_BYTES
