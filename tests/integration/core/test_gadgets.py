"""Whatever an authenticated peer sends, a strict worker runs and imports nothing of it.

Each gadget goes, as raw bytes, over a real connection that knows the secret.  Python's
own audit events say whether anything was imported, compiled, opened or started; a file
says whether anything ran.  Then the worker must serve the next honest call.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, ClassVar

import msgpack
import pytest
import uvloop

import asyncrpc
from asyncrpc import Options, Policy, RemoteError, UsageError, Worker
from asyncrpc.core.serde import compression_named
from asyncrpc.core.serde.functions import FunctionTable
from asyncrpc.core.wire.frames import HEADER, HEADER_BYTES, FrameKind, Hello, prefix
from asyncrpc.core.wire.limits import MessageLimits
from tests.fuzz.auditing import watched
from tests.integration.core import gadgets
from tests.integration.core.gadgets import MODULE, SENTINEL, Gadget, ref, value
from tests.integration.core.groups import LIMIT_S, alone
from tests.integration.core.raw_connections import Stream, dialed, prove

SECRET = "the right one of many"
OPTIONS = Options(
    secret=SECRET,
    policy=Policy.STRICT,
    allow=(f"{MODULE}:make_plain",),
    network=asyncrpc.NetworkOptions(listen=("tcp://127.0.0.1:0",)),
    drain_timeout_s=0.5,
    # The sidecar is a process, which peers that cannot look for themselves may start.
    liveness=asyncrpc.LivenessOptions(heartbeat_s=0.5, lost_after_s=1.0, sidecar="off"),
    limits=asyncrpc.LimitOptions(
        message=MessageLimits(control_bytes_max=8 << 20, unpacked_bytes_max=16 << 20)
    ),
)
_numbers = itertools.count(1000)


@pytest.fixture(autouse=True)
def _no_trace() -> Iterator[None]:
    SENTINEL.unlink(missing_ok=True)
    yield
    SENTINEL.unlink(missing_ok=True)


@pytest.fixture
async def server() -> AsyncIterator[Worker]:
    async with alone("ps", OPTIONS) as worker:
        yield worker


@pytest.fixture
async def friend(server: Worker) -> AsyncIterator[Worker]:
    where = {"friend": "tcp://127.0.0.1:9", "ps": server.addresses}
    async with Worker("friend", rendezvous=where, options=OPTIONS) as worker:
        assert await worker.peer("ps").call(gadgets.exposed, 1) == 1
        yield worker


class Peer:
    """A peer that has authenticated, and speaks in bytes."""

    def __init__(self, stream: Stream, number: int) -> None:
        self._reader, self._writer = stream
        self.number = number

    async def say(self, message: bytes) -> list[tuple[int, bytes, bytes]]:
        """Send bytes, then a PING; return kind, head and control of what comes back.

        Until the PONG, or until the worker closes the connection.
        """
        self._writer.write(message + prefix(FrameKind.PING))
        frames = []
        try:
            async with asyncio.timeout(LIMIT_S):
                while (frame := await self.read())[0] != FrameKind.PONG:
                    frames.append(frame)
        except (asyncio.IncompleteReadError, ConnectionError):
            frames.append((0, b"", b""))
        return frames

    async def answer_to(self, message: bytes) -> tuple[int, bytes, bytes]:
        """Send a request; return its answer."""
        self._writer.write(message)
        async with asyncio.timeout(LIMIT_S):
            while True:
                text = await self.read()
                if text[0] in (FrameKind.RESPONSE, FrameKind.ERROR):
                    return text

    async def read(self) -> tuple[int, bytes, bytes]:
        _, _, kind, _, head, control, count, _, self.call_id, payload = HEADER.unpack(
            await self._reader.readexactly(HEADER_BYTES)
        )
        body = await self._reader.readexactly(head + control + 8 * count + payload)
        return kind, body[:head], body[head : head + control]

    def send(self, message: bytes) -> None:
        self._writer.write(message)


@asynccontextmanager
async def authenticated(server: Worker) -> AsyncIterator[Peer]:
    number = next(_numbers)
    record = Hello(f"raw-{number}", number, -1, 1, expects="ps")
    async with dialed(server) as stream:
        await prove(stream, SECRET)
        stream[1].write(prefix(FrameKind.HELLO, control=record.encode()))
        peer = Peer(stream, number)
        assert (await peer.read())[0] == FrameKind.HELLO
        # Only a connection whose dialer has shown that it holds it is called over.
        peer.send(prefix(FrameKind.ACK))
        yield peer


async def with_values(peer: Peer) -> None:
    """Have two values made that stay: of a class that is exposed, and of another."""
    for serial, name in ((1, "make"), (2, "make_plain")):
        meta = {"r": [peer.number, serial]}
        message = gadgets.request([], target=[0, f"{MODULE}:{name}"], meta=meta)
        assert (await peer.answer_to(message))[0] == FrameKind.RESPONSE


FAMILIES: dict[str, Callable[[int], Iterator[Gadget]]] = {
    "names": lambda _: gadgets.by_name(),
    "pickles": lambda _: gadgets.by_pickle(),
    "methods": lambda _: gadgets.by_method(),
    "references": gadgets.by_reference,
    "errors": lambda _: gadgets.by_error(),
    "plain values": lambda _: gadgets.by_plain_value(),
    "sizes": lambda _: gadgets.by_size(),
    "services": lambda _: gadgets.by_service(),
    "optimizers": lambda _: gadgets.by_optimizer(),
    "meta": lambda _: gadgets.by_meta(),
}


async def play(server: Worker, family: str) -> int:
    """Send every gadget of a family; a peer that is cut off comes back for the next."""
    sent = 0
    pending = FAMILIES[family]
    done = False
    while not done:
        async with authenticated(server) as peer:
            if family == "references":
                await with_values(peer)
            for gadget in itertools.islice(pending(peer.number), sent, None):
                sent += 1
                answers = await peer.say(gadget.message)
                assert not SENTINEL.exists(), gadget.what
                if (0, b"", b"") in answers:
                    break
            else:
                done = True
    return sent


class TestGadgets:
    """On one loop: what is decoded does not depend on it, and there are thousands."""

    loops: ClassVar = {"uvloop": uvloop.new_event_loop}

    @pytest.mark.slow
    @pytest.mark.parametrize("family", FAMILIES)
    async def test_gadgets_have_no_effect(
        self, server: Worker, friend: Worker, family: str
    ) -> None:
        for codec in ("lz4", "zstd"):  # by these names alone, packages may be imported
            with contextlib.suppress(UsageError):
                compression_named(codec)
        modules = set(sys.modules)
        with watched(everywhere=True) as seen:
            assert await play(server, family) > 10 or family == "pickles"
        assert not SENTINEL.exists()
        assert set(sys.modules) == modules
        assert [event for event in seen if "socket" not in event] == []
        assert await friend.peer("ps").call(gadgets.exposed, 1, 2) == 2


async def test_exposed_functions_work_in_raw_bytes(server: Worker) -> None:
    """The control of the tests above: the bytes have the same form."""
    async with authenticated(server) as peer:
        await with_values(peer)
        kind, _, control = await peer.answer_to(gadgets.request([1, 2]))
        assert (kind, control[4:]) == (FrameKind.RESPONSE, msgpack.packb(2))
        target = ["=", peer.number, 1, "method"]
        kind, _, control = await peer.answer_to(gadgets.request([], target=target))
        assert (kind, control[4:]) == (FrameKind.RESPONSE, msgpack.packb(42))
        entries = ([8, f"{MODULE}:exposed"], [10, msgpack.packb([ref(0), [1], {}])])
        kind, _, control = await peer.answer_to(gadgets.request([ref(1)], *entries))
        assert (kind, control[4:]) == (FrameKind.RESPONSE, msgpack.packb(1))


async def test_trusting_worker_unpickles() -> None:
    """The control of the tests above."""
    options = replace(OPTIONS, policy=Policy.TRUSTED)
    async with alone("ps", options) as server, authenticated(server) as peer:
        await peer.answer_to(next(gadgets.by_pickle()).message)
    assert SENTINEL.exists()


TYPES = (
    *("gadget_bait:Oops", "subprocess:CalledProcessError", "os:error", "builtins:eval"),
    *("builtins:SystemExit", "builtins:KeyboardInterrupt", "builtins:GeneratorExit"),
    *("builtins:StopIteration", "asyncio:CancelledError", f"{MODULE}:Plain"),
    *(f"{MODULE}:ExposedError", f"{MODULE}:ExposedError.__class__", "", ":", "x" * 999),
    *("asyncrpc.errors:AsyncRpcError", "asyncrpc.errors:Outcome", "builtins:object"),
    *("builtins:BaseExceptionGroup", "builtins:OSError", "a.b.c:d", "torch:load"),
)


def error_of(name: str, **fields: Any) -> bytes:
    """Return what describes an exception of a class."""
    tree: dict[str, Any] = {
        "type": name,
        "message": "forged",
        "traceback": "forged",
        "args": [gadgets.COMMAND],
        "state": {"__class__": 1, "function": "x"},
        "slots": {"__traceback__": None, "__dict__": {}},
        "notes": ["forged"],
        "cause": None,
        "context": None,
        "suppress": False,
        "members": [],
        "worker": "raw",
        "pid": 1,
    }
    return value(tree | fields)


async def test_forged_errors_become_errors(server: Worker, friend: Worker) -> None:
    """What a strict worker is answered is rebuilt of what it has, or only quoted."""
    modules = set(sys.modules)
    async with authenticated(server) as peer:
        to = f"raw-{peer.number}"
        with watched(everywhere=True) as seen:
            for name in TYPES:
                call = server.parts.start_call(to, gadgets.exposed)
                while (await peer.read())[0] != FrameKind.REQUEST:
                    pass
                peer.send(prefix(FrameKind.ERROR, peer.call_id, control=error_of(name)))
                with pytest.raises(RemoteError) as caught:
                    await call
                assert "forged" in str(caught.value)
                assert isinstance(caught.value, Exception)
                assert not isinstance(caught.value, (StopIteration, SystemExit))
    assert seen == []
    assert set(sys.modules) == modules
    assert not SENTINEL.exists()
    assert await friend.peer("ps").call(gadgets.exposed, 1) == 1


def test_allow_patterns_exclude_private_names() -> None:
    """A private function is allowed by its whole name alone."""
    table = FunctionTable(Policy.STRICT, (f"{MODULE}:*",))
    assert table.is_allowed(gadgets.trace)
    assert not table.is_allowed(gadgets._private)  # noqa: SLF001
    assert not table.is_allowed(gadgets.Plain.__init__)
    assert table.is_allowed_method(gadgets.Plain, "method")
    assert not table.is_allowed_method(gadgets.Unpickled, "__reduce__")
    spelled = FunctionTable(Policy.STRICT, (f"{MODULE}:_private",))
    assert spelled.is_allowed(gadgets._private)  # noqa: SLF001


def test_allowed_methods_are_defined_by_the_class() -> None:
    table = FunctionTable(Policy.STRICT)
    assert table.is_allowed_method(gadgets.Exposed, "method")
    for name in ("held", "computed", "count", "_private", "__call__", "missing"):
        assert not table.is_allowed_method(gadgets.Exposed, name), name
    assert not SENTINEL.exists()
