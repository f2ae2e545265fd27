"""Raw connections to a worker: who knocks, and how."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from asyncrpc import Worker
from asyncrpc.core.wire.frames import FrameKind, Hello, prefix
from asyncrpc.core.wire.handshake import NONCE_BYTES, Handshake, Role
from tests.integration.core.groups import LIMIT_S

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def dialed(server: Worker) -> AsyncIterator[Stream]:
    """Connect to a worker's first address, and say nothing."""
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


async def prove(stream: Stream, secret: str | None) -> None:
    """Go through the handshake, as one who knows the secret."""
    reader, writer = stream
    known = None if secret is None else secret.encode()
    handshake = Handshake(Role.DIALER, known, os.urandom(NONCE_BYTES))
    writer.write(handshake.start())
    while handshake.wanted:
        writer.write(handshake.receive(await reader.readexactly(handshake.wanted)))


def hello(name: str = "raw", expects: str = "ps", incarnation: int = 7) -> bytes:
    """Return the HELLO of a worker that is none."""
    record = Hello(name=name, incarnation=incarnation, rank=-1, pid=1, expects=expects)
    return prefix(FrameKind.HELLO, control=record.encode())
