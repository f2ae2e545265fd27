"""Records of fixed form: HELLO, heads, and what a rendezvous tells of a worker."""

from __future__ import annotations

from collections.abc import Iterator

import msgpack

from asyncrpc.core.ids import Incarnation
from asyncrpc.core.members import Member
from asyncrpc.core.transport.address import Address
from asyncrpc.core.wire.frames import Hello, unpack_head
from asyncrpc.errors import AsyncRpcError, LocalProtocolError, RemoteProtocolError
from tests.fuzz.choices import Choices

TEXTS = ("a", "", "tcp://127.0.0.1:1", "uds:///x", "tcp://[::1]:65536", "\0", "é")
FIELDS_MAX = 20


def check(data: bytes) -> None:
    """Read a HELLO; what is one, is written and read again as the same."""
    choices = Choices(data)
    if choices.below(2):
        record = [choices.tree(TEXTS) for _ in range(choices.below(FIELDS_MAX))]
        packed = msgpack.packb(record)
    else:
        packed = bytes(choices.left)
    try:
        unpack_head(packed)
        hello = Hello.decode(packed)
    except RemoteProtocolError:
        return
    for text in hello.addresses:
        try:
            Address.parse(text)
        except AsyncRpcError:
            continue
    try:
        again = hello.encode()
    except LocalProtocolError:  # a reader knows fewer fields than were sent
        return
    assert Hello.decode(again) == hello


def seeds() -> Iterator[bytes]:
    """Give HELLOs and records of members."""
    least = Hello(name="a", incarnation=1, rank=-1, pid=1)
    full = Hello(
        *("b", 1 << 63, 3, 99, "ps", 2, "duplicate", ("tcp://127.0.0.1:1",), "host"),
        *(True, 1 << 63, 7, 1 << 40, ("uds:///x",)),
    )
    for hello in (least, full):
        yield b"\0" + hello.encode()
    yield b"\0" + Member("a", 0, Incarnation(1), ("tcp://a:1",), "h").encode()
    yield bytes([1, 15, 5, 0, 3, 0, 1, 1, 3, 1, 2, 1, 3, 0, 1, 1, 5, 1, 3, 0, 0, 1])
