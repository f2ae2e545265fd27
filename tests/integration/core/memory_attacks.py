"""What one peer that is let in can do to the memory and the loop of a worker.

`ATTACKS` are what a peer sends to the worker of `attacked_worker`, over one raw
connection each.  `python -m tests.bench.bench_hostile` shows what each costs.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgpack

from asyncrpc.core.calls.credit import request_bytes
from asyncrpc.core.calls.peer_memory import FREE_BYTES_MAX
from asyncrpc.core.serde import kinds, lossless
from asyncrpc.core.serde.lossless import BLOCK_BYTES
from asyncrpc.core.wire.frames import FrameKind, prefix
from tests.integration.core.attacked_worker import MIB, MODULE, RawPeer, flat


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
    return b"".join(
        extension(kinds.BIG_INT, msgpack.packb(number)) for number in numbers
    )


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
        if not peer.writer.is_closing():
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
                await asyncio.wait_for(peer.writer.drain(), UNREAD_S)
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
        FrameKind.NOTICE, ["memory", "attach"], 64, 1 << 30
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
            "collectives", "failed", lambda _, n: [n % 1000, 0, ["", "p" * 3000, ["x"]]]
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
