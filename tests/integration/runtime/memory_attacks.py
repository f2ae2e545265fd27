"""What one peer that is let in can do to the memory and the loop of a worker.

`victim` is the attacked process; `ATTACKS` are what a peer sends to it, over one raw
connection each.  `python -m tests.bench.bench_hostile` shows what each costs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgpack

from asyncrpc.runtime.calls.admission import FREE_BYTES_MAX
from asyncrpc.runtime.calls.credit import request_bytes
from asyncrpc.serde import kinds, lossless
from asyncrpc.serde.lossless import BLOCK_BYTES
from asyncrpc.wire.frames import (
    HEADER,
    HEADER_BYTES,
    Flags,
    FrameKind,
    data_prefix,
    prefix,
)
from tests.forked import forked
from tests.integration.runtime.raw_connections import Stream, hello, prove

MIB: Final = 1 << 20
SECRET: Final = "a secret of 32 characters or more"
CREDIT: Final = FrameKind.CREDIT
CHUNK_BYTES: Final = 512 << 10
ANSWER_S: Final = 60.0  # only a failure reaches it
MODULE: Final = __name__

PROGRAM: Final = f"""
import asyncio, logging, os, asyncrpc
from tests.integration.runtime import memory_attacks

logging.lastResort = None  # nobody reads what it would print


async def main():
    options = asyncrpc.Options(
        policy=asyncrpc.Policy.STRICT,
        allow=("{MODULE}:*",),
        secret="{SECRET}",
        network=asyncrpc.NetworkOptions(listen=("tcp://127.0.0.1:0",)),
    )
    async with asyncrpc.Worker(
        "ps", rank=0, rendezvous=asyncrpc.LocalRendezvous(1), options=options
    ) as worker:
        print(worker.addresses[0], os.getpid(), flush=True)
        await memory_attacks.measure_lag()

runner = asyncrpc.run if os.environ.get("UVLOOP") else asyncio.run
runner(main())
"""

_lags_s: list[float] = []


async def measure_lag() -> None:
    """Note by how much the loop is late, for ever."""
    loop = asyncio.get_running_loop()
    while True:
        due_s = loop.time() + 0.01
        await asyncio.sleep(0.01)
        _lags_s.append(loop.time() - due_s)


async def worst_lag_s() -> float:
    worst_s = max(_lags_s, default=0.0)
    _lags_s.clear()
    return worst_s


async def size_of(value: Any) -> int:
    return len(value)


async def text_of(nbytes: int) -> str:
    return "x" * nbytes


async def wait(_: Any = None) -> None:
    await asyncio.Event().wait()


@dataclass
class Victim:
    """A worker in a process of its own.

    Attributes:
        host: of its address.
        port: of its address.
        pid: of its process.
    """

    host: str
    port: int
    pid: int

    def _status(self, name: str) -> int:
        status = Path(f"/proc/{self.pid}/status").read_text()
        line = next(one for one in status.splitlines() if one.startswith(name))
        return int(line.split()[1]) << 10

    @property
    def resident_bytes(self) -> int:
        return self._status("VmRSS")

    @property
    def peak_bytes(self) -> int:
        """The most since `forget_peak`."""
        return self._status("VmHWM")

    def forget_peak(self) -> None:
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")


@contextlib.contextmanager
def victim(**environment: str) -> Iterator[Victim]:
    """Start a worker to be attacked."""
    with forked(PROGRAM, **environment) as program:
        for line in program.output:
            if line.startswith("tcp://"):
                address, pid = line.split()
                host, port = address.removeprefix("tcp://").rsplit(":", 1)
                yield Victim(host, int(port), int(pid))
                break
        program.kill()


class RawPeer:
    """A peer that has been let in, and sends what it wants.

    Attributes:
        incarnation: this life of it.
        granted_bytes: credit that the victim has given for its requests.
        sent_bytes: in messages.
        first_id: added to the number of each call.
    """

    def __init__(self, stream: Stream, victim: Victim) -> None:
        self.reader, self.writer = stream
        self.victim = victim
        self.incarnation = int.from_bytes(os.urandom(8), "little")
        self.granted_bytes = self.sent_bytes = 0
        self.first_id = 0

    def send(
        self,
        kind: FrameKind,
        head: list[Any],
        control: bytes,
        call_id: int = 1,
        payload: bytes = b"",
        *,
        announced: int = 0,
    ) -> None:
        """Write a frame, as fast as it goes."""
        nbytes = announced or len(payload)
        frame = prefix(
            kind,
            self.first_id + call_id,
            flags=Flags.DEFERRED if announced else 0,
            aux=-1 if kind in (FrameKind.REQUEST, FrameKind.SERVICE) else 0,
            head=msgpack.packb(head),
            control=control,
            lengths=[nbytes] if nbytes else [],
            payload_bytes=nbytes,
        )
        self.writer.write(frame + payload)
        self.sent_bytes += len(frame) + len(payload)

    def call(self, name: str, control: bytes, call_id: int = 1, **more: Any) -> None:
        """Write a request for a function of this module."""
        head = [[0, f"{MODULE}:{name}"], None]
        self.send(FrameKind.REQUEST, head, control, call_id, **more)

    async def send_data(self, call_id: int, payload: bytes) -> None:
        """Write a payload that has been announced."""
        for at in range(0, len(payload), CHUNK_BYTES):
            chunk = payload[at : at + CHUNK_BYTES]
            serial = self.first_id + call_id
            self.writer.write(data_prefix(serial, at, len(chunk)) + chunk)
            self.sent_bytes += len(chunk)
            await self.writer.drain()

    async def frame(self) -> tuple[int, int, bytes]:
        """Return kind, call and control part of the next frame."""
        start = await self.reader.readexactly(HEADER_BYTES)
        fields = HEADER.unpack(start)
        kind, flags, head_bytes, control_bytes, count = fields[2:7]
        call_id, payload_bytes = fields[8:]
        await self.reader.readexactly(head_bytes)
        control = await self.reader.readexactly(control_bytes)
        inline = 0 if flags & Flags.DEFERRED else payload_bytes
        await self.reader.readexactly(8 * count + inline)
        return kind, call_id, control

    async def until(self, kind: FrameKind, call_id: int) -> bool:
        """Read until such a frame; return False if the connection ends before."""
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            async with asyncio.timeout(ANSWER_S):
                await self.writer.drain()
                while (await self.frame())[:2] != (kind, call_id):
                    pass
            return True
        return False

    async def drain(self) -> bool:
        """Wait until all has been handled; return whether the connection is open."""
        if self.writer.is_closing():
            return False
        self.writer.write(prefix(FrameKind.PING, 7))
        return await self.until(FrameKind.PONG, 7)

    async def wants(self, call_id: int, nbytes: int) -> bool:
        """Ask for credit; return whether there is some at once."""
        if self.writer.is_closing():
            return False
        call_id += self.first_id
        self.writer.write(prefix(FrameKind.WANT, call_id, aux=nbytes))
        self.writer.write(prefix(FrameKind.PING, call_id))
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            async with asyncio.timeout(ANSWER_S):
                while True:
                    kind, of_call, _ = await self.frame()
                    if of_call == call_id and kind in (CREDIT, FrameKind.PONG):
                        self.granted_bytes += nbytes * (kind == CREDIT)
                        return kind == CREDIT
        return False


@contextlib.asynccontextmanager
async def raw_peer(target: Victim, name: str = "liar") -> AsyncIterator[RawPeer]:
    """Connect to a victim, as one who knows the secret."""
    reader, writer = await asyncio.open_connection(target.host, target.port)
    try:
        await prove((reader, writer), SECRET)
        peer = RawPeer((reader, writer), target)
        writer.write(hello(name, incarnation=peer.incarnation) + prefix(FrameKind.ACK))
        yield peer
    finally:
        writer.transport.abort()


# --- what is sent --------------------------------------------------------------------


def flat(tree: bytes) -> bytes:
    return kinds.FLAT + tree


def with_table(tree: bytes, entries: list[Any]) -> bytes:
    table: bytes = msgpack.packb(entries)
    return struct.pack("<I", len(table)) + table + tree


def arguments(tree: bytes) -> bytes:
    return b"\x92\x91" + tree + b"\x80"


def array(count: int, trees: bytes) -> bytes:
    return b"\xdd" + struct.pack(">I", count) + trees


def extension(code: int, tree: bytes) -> bytes:
    return b"\xc9" + struct.pack(">Ib", len(tree), code) + tree


def big_integers(count: int) -> bytes:
    modulus = (1 << 61) - 1
    numbers = (((n + 8) * modulus).to_bytes(10, "little") for n in range(count))
    return b"".join(extension(kinds.BIG_INT, msgpack.packb(one)) for one in numbers)


Attack = Callable[[RawPeer], Awaitable[None]]
NOTHING: Final = flat(arguments(b"\xc0"))
UNREAD_S: Final = 5.0  # a victim that takes no more has stopped, or is behind


def content(tree: Callable[[], bytes], times: int = 1, name: str = "wait") -> Attack:
    """Return what sends a value in many calls, none of which ends."""

    async def attack(peer: RawPeer) -> None:
        control = flat(arguments(tree()))
        nbytes = request_bytes(control, len(control), ())
        for call_id in range(1, times + 1):
            if nbytes > FREE_BYTES_MAX and not await peer.wants(call_id, nbytes):
                break
            peer.call(name, control, call_id)
        await peer.drain()

    return attack


def announced(
    kind: FrameKind, head: list[Any], times: int, nbytes: int, begun: int = 0
) -> Attack:
    """Return what announces payloads, and sends little of them."""

    async def attack(peer: RawPeer) -> None:
        for call_id in range(1, times + 1):
            if kind == FrameKind.REQUEST and not await peer.wants(call_id, nbytes):
                break
            peer.send(kind, head, flat(b"\xc0"), call_id, announced=nbytes)
            if not await peer.drain():
                break
        if begun:
            peer.writer.write(prefix(FrameKind.DATA, 1, payload_bytes=512 << 10)[:40])
            peer.writer.write(bytes(begun))
        await peer.drain()

    return attack


def bombs(codec: str, times: int, packed: int, plain: int = 0) -> Attack:
    """Return what sends zeros in blocks, so many of them packed: small until unpacked.

    Each request has credit, if the victim gives it.
    """

    async def attack(peer: RawPeer) -> None:
        compressed = lossless.compress(codec, memoryview(bytes(BLOCK_BYTES)), 1, 0)
        assert compressed is not None
        block = bytes(compressed[0])
        payload = bytes(plain * BLOCK_BYTES) + block * packed
        lengths = [BLOCK_BYTES] * plain + [len(block)] * packed
        packing = ["", "", (plain + packed) * BLOCK_BYTES, codec, lengths]
        packings = msgpack.packb([packing])
        inner = with_table(arguments(extension(kinds.REFERENCE, b"\0")), [[5, 0]])
        control = struct.pack("<I", len(packings) | kinds.PACKED) + packings + inner
        nbytes = request_bytes(control, len(control), [len(payload)])
        for call_id in range(1, times + 1):
            if not await peer.wants(call_id, nbytes):
                break
            if plain:
                peer.call("wait", control, call_id, announced=len(payload))
                await peer.send_data(call_id, payload)
            else:
                peer.call("wait", control, call_id, payload=payload)
        await peer.drain()

    return attack


async def many_calls(peer: RawPeer) -> None:
    for call_id in range(1, 60_001):
        peer.call("wait", flat(arguments(b"\xc0")), call_id)
        if not call_id % 1000 and not await peer.drain():
            break


async def many_messages(peer: RawPeer) -> None:
    for call_id in range(1, 60_001):
        peer.send(FrameKind.SERVICE, ["rref", "nothing"], flat(b"\xc0"), call_id)
        if not call_id % 1000 and not await peer.drain():
            break


async def many_names(peer: RawPeer) -> None:
    for number in range(1, 70_001):
        head = [[number, f"{MODULE}:no_such_function_{number}"], None]
        peer.send(FrameKind.REQUEST, head, flat(arguments(b"\xc0")), number)
        if not number % 1000 and not await peer.drain():
            break


async def long_names(peer: RawPeer) -> None:
    for number in range(1, 5001):
        head = [[number, f"{number:060000}"], None]
        peer.send(FrameKind.REQUEST, head, flat(arguments(b"\xc0")), number)
        if not number % 100 and not await peer.drain():
            break


async def cancels(peer: RawPeer) -> None:
    for call_id in range(1, 20_001):
        peer.call("wait", flat(arguments(b"\xc0")), call_id)
        if not call_id % 1000 and not await peer.drain():
            break
    frames = [prefix(FrameKind.CANCEL, call_id) for call_id in range(1, 20_001)]
    peer.writer.write(b"".join(frames))
    await peer.drain()


def and_gone(attack: Attack) -> Attack:
    """Return what does something, and then breaks the protocol."""

    async def attack_and_go(peer: RawPeer) -> None:
        await attack(peer)
        peer.writer.write(b"garbage" * 10)
        await peer.until(FrameKind.CLOSE, 0)

    return attack_and_go


async def wrong_notices(peer: RawPeer) -> None:
    for number in range(1, 20_001):
        peer.send(FrameKind.NOTICE, ["rref", "release"], flat(b"\xc0"), number)
    await peer.drain()


async def long_bytes(peer: RawPeer) -> None:
    """A value that is copied from its payload."""
    nbytes = 256 * MIB
    tree = arguments(extension(kinds.REFERENCE, b"\0"))
    control = with_table(tree, [[kinds.ENTRY_BYTES, 0]])
    if not await peer.wants(1, 2 * nbytes):
        return
    peer.call("size_of", control, 1, announced=nbytes)
    await peer.send_data(1, bytes(nbytes))
    await peer.drain()


def many(make: Callable[[RawPeer, int], None], times: int, every: int = 500) -> Attack:
    """Return what sends a message many times, and sees now and then that it is read."""

    async def attack(peer: RawPeer) -> None:
        for call_id in range(1, times + 1):
            make(peer, call_id)
            if not call_id % every and not await peer.drain():
                break

    return attack


def call_with(control: bytes, payload: bytes = b"", meta: Any = None) -> Any:
    """Return what sends a call that waits."""
    head = [[0, f"{MODULE}:wait"], meta]

    def make(peer: RawPeer, call_id: int) -> None:
        peer.send(FrameKind.REQUEST, head, control, call_id, payload)

    return make


def call_in(
    meta: Callable[[RawPeer, int], dict[str, Any]],
) -> Callable[[RawPeer, int], None]:
    """Return what sends a call with metadata, which is answered."""

    def make(peer: RawPeer, call_id: int) -> None:
        head = [[0, f"{MODULE}:size_of"], meta(peer, call_id)]
        peer.send(FrameKind.REQUEST, head, flat(arguments(b"\xa0")), call_id)

    return make


def notices(
    service: str, method: str, content: Callable[[RawPeer, int], list[Any]]
) -> Callable[[RawPeer, int], None]:
    """Return what sends a notice."""

    def make(peer: RawPeer, number: int) -> None:
        control = flat(msgpack.packb(content(peer, number)))
        peer.send(FrameKind.NOTICE, [service, method], control, number)

    return make


async def ended_passes(peer: RawPeer) -> None:
    """Tell the ends of backward passes that nobody knows, in a context."""
    me = peer.incarnation
    call_in(lambda _, n: {"a": [me, n, 0]})(peer, 1)
    its_own = notices("autograd", "abort", lambda _, n: [me, 1, me, n])
    of_others = notices("autograd", "abort", lambda _, n: [me, 1, me ^ 1, n])
    await many(its_own, 150_000, 1000)(peer)
    await many(of_others, 150_000, 1000)(peer)


WIDE: Final = "\U0001f600".encode()


def text(nbytes: int, content: bytes) -> bytes:
    """Return a text that repeats its content."""
    content *= nbytes // len(content)
    return b"\xdb" + struct.pack(">I", len(content)) + content


def answered(nbytes: int, announced: int) -> Attack:
    """Return what answers calls that were never made."""
    control = flat(b"\xdb" + struct.pack(">I", nbytes) + bytes(nbytes))

    def make(peer: RawPeer, call_id: int) -> None:
        peer.send(FrameKind.RESPONSE, [], control, call_id, announced=announced)

    return many(make, 40, 1)


async def unread(peer: RawPeer) -> None:
    """Ask, and read nothing, for small answers."""
    transport: Any = peer.writer.transport
    transport.pause_reading()
    for call_id in range(1, 200_001):
        peer.call("text_of", flat(arguments(b"\xcd\x07\xd0")), call_id)
        if not call_id % 500:
            if peer.writer.is_closing():
                break
            try:
                async with asyncio.timeout(UNREAD_S):
                    await peer.writer.drain()
            except (TimeoutError, ConnectionError):
                break
    with contextlib.suppress(RuntimeError):  # the reader has done so
        transport.resume_reading()
    await peer.drain()


def at_once(*names: str) -> Attack:
    """Return what does several things over one connection, none of which ends."""

    async def attack(peer: RawPeer) -> None:
        for number, name in enumerate(names, 1):
            if peer.writer.is_closing():
                break
            peer.first_id = number * 1_000_000
            await ATTACKS[name](peer)

    return attack


def rows(tree: bytes, nbytes: int) -> Callable[[], bytes]:
    return lambda: array(nbytes // len(tree), tree * (nbytes // len(tree)))


SET: Final = extension(kinds.SET, b"\x90")
ATTACKS: Final[dict[str, Attack]] = {
    "empty lists, 32 MiB": content(rows(b"\x90", 32 * MIB)),
    "empty lists, 1 MiB": content(rows(b"\x90", MIB)),
    "empty lists, 60 KiB, 60 calls": content(rows(b"\x90", 60 << 10), 60),
    "empty maps, 1 MiB": content(rows(b"\x80", MIB)),
    "empty sets, 1 MiB": content(rows(SET, MIB)),
    "integers, 2 MiB": content(rows(b"\xe3", 2 * MIB - 64)),
    "floats, 3 MiB": content(rows(b"\xcb" + bytes(8), 3 * MIB)),
    "lists, 7 KiB, 600 calls": content(rows(b"\x90", 7 << 10), 600),
    "integers, 100 KiB, 200 calls": content(rows(b"\xe3", 100 << 10), 200),
    "lists in lists": content(lambda: b"\x91" * 900 + b"\xc0"),
    "equal hashes, 400 KiB": content(
        lambda: extension(kinds.SET, array(20_000, big_integers(20_000)))
    ),
    "equal hashes, 50 KiB, 50 calls": content(
        lambda: extension(kinds.SET, array(2500, big_integers(2500))), 50
    ),
    "bombs, lz4": bombs("lz4", 64, 8),
    "bombs, zstd": bombs("zstd", 24, 200),
    "bombs of 1 MiB": bombs("zstd", 1000, 1),
    "bombs, 16 times": bombs("zstd", 8, 16, 1),
    "notices announced": announced(FrameKind.NOTICE, ["rref", "release"], 4, 1 << 30),
    "notices with payloads announced": announced(
        FrameKind.NOTICE, ["rounds", "up"], 64, 1 << 30
    ),
    "messages announced": announced(
        FrameKind.SERVICE, ["autograd", "close"], 8, 1 << 30
    ),
    "messages with payloads announced": announced(
        FrameKind.SERVICE, ["optim", "step"], 64, 64 * MIB
    ),
    "requests announced": announced(
        FrameKind.REQUEST, [[0, f"{MODULE}:wait"], None], 60, 64 * MIB
    ),
    "texts, 7 KiB": many(call_with(flat(arguments(text(7600, WIDE)))), 3000),
    "payloads, 8 KB": many(
        call_with(
            with_table(
                arguments(extension(kinds.REFERENCE, b"\0")), [[kinds.ENTRY_BYTES, 0]]
            ),
            bytes(8000),
        ),
        14_000,
    ),
    "heads of lists": many(call_with(NOTHING, meta={"zz": [[]] * 9000}), 400, 50),
    "heads of text": many(call_with(NOTHING, meta={"zz": "a" * 60_000}), 4000, 100),
    "answers to calls that were not made": answered(15 * MIB, 1000),
    "payloads of answers to calls that were not made": answered(10, 1 << 30),
    "small answers, unread": unread,
    "references": many(
        call_in(lambda peer, n: {"r": [peer.incarnation, n]}), 300_000, 1000
    ),
    "references that are mentioned": many(
        notices("rref", "register", lambda peer, n: [peer.incarnation, n]),
        300_000,
        1000,
    ),
    "autograd contexts": many(
        call_in(lambda peer, n: {"a": [peer.incarnation, n, 0]}), 150_000, 1000
    ),
    "autograd contexts of others": many(
        call_in(lambda _, n: {"a": [n, n, 0, "other"]}), 150_000, 1000
    ),
    "passes that have ended": ended_passes,
    "groups that nobody made": many(
        notices("collectives", "woke", lambda _, n: [n]), 300_000, 1000
    ),
    "failures in such groups": many(
        notices(
            "collectives",
            "failed",
            lambda _, n: [n % 1000, 0, ["", "p" * 3000, ["x"]]],
        ),
        150_000,
        1000,
    ),
    "calls": many_calls,
    "messages": many_messages,
    "names": many_names,
    "long names": long_names,
    "cancels": cancels,
    "calls, and gone": and_gone(many_calls),
    "wrong notices": wrong_notices,
    "bytes, 256 MiB": long_bytes,
    "text, 60 MiB": content(lambda: text(60 * MIB, b"n")),
    "text, 16 MiB": content(lambda: text(16 * MIB, b"n")),
    "texts, 16 MiB, wide": content(lambda: array(2, 2 * text(16 * MIB, WIDE))),
    "texts, 60 KB, wide": content(rows(text(60_000, b"n" * 59_996 + WIDE), 60 * MIB)),
    "texts, 1 KB, wide": content(rows(text(1000, b"n" * 996 + WIDE), 60 * MIB)),
    "texts, 31 bytes, wide": content(rows(b"\xbf" + b"n" * 27 + WIDE, 60 * MIB)),
    "texts, 31 bytes, wide, 30 MiB": content(
        rows(b"\xbf" + b"n" * 27 + WIDE, 30 * MIB)
    ),
    "texts, 31 bytes, wide, 100 calls": content(
        rows(b"\xbf" + b"n" * 27 + WIDE, 2 * MIB - 64), 100
    ),
    "texts, 1 KB, wide, 100 calls": content(
        rows(text(1000, b"n" * 996 + WIDE), 2 * MIB - 64), 100
    ),
    "dates, 60 KiB, 20 calls": content(
        rows(
            extension(kinds.DATETIME, msgpack.packb(["2020-01-01T00:00:00", 0])),
            60 << 10,
        ),
        20,
    ),
}
ATTACKS.update(
    (f"{name}, and gone", and_gone(ATTACKS[name]))
    for name in ("references", "autograd contexts", "autograd contexts of others")
)
ATTACKS["all at once"] = at_once(
    "payloads, 8 KB",
    "texts, 7 KiB",
    "integers, 100 KiB, 200 calls",
    "heads of text",
    "requests announced",
    "small answers, unread",
)


async def honest_call(target: Victim, name: str = "worst_lag_s") -> Any:
    """Return what a newcomer gets from the victim."""
    async with raw_peer(target, f"honest-{os.urandom(4).hex()}") as peer:
        head = [[0, f"{MODULE}:{name}"], None]
        peer.send(FrameKind.REQUEST, head, flat(b"\x92\x90\x80"))
        async with asyncio.timeout(ANSWER_S):
            while True:
                kind, _, control = await peer.frame()
                if kind in (FrameKind.RESPONSE, FrameKind.ERROR):
                    assert kind == FrameKind.RESPONSE, control
                    return msgpack.unpackb(control[kinds.LENGTH_BYTES :])
