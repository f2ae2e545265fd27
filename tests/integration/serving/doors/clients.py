"""Clients that read what they want to, when they want to."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import aiohttp
from yarl import URL

BUFFER_BYTES = 64 << 10  # of the kernel, at both ends, so that little is on the way
_UPGRADE = (
    "Connection: Upgrade\r\n"
    "Upgrade: websocket\r\n"
    "Sec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)


@asynccontextmanager
async def stalled(
    client: aiohttp.ClientSession, path: str, *, upgrade: bool = False
) -> AsyncIterator[asyncio.StreamWriter]:
    """Ask for a path, read the head of the response, and then nothing more.

    The connection breaks at the end of the context.
    """
    url: URL = client._base_url  # type: ignore[assignment]  # noqa: SLF001
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
    raw.settimeout(0)
    try:
        await asyncio.get_running_loop().sock_connect(raw, (url.host, url.port))
    except BaseException:
        raw.close()
        raise
    reader, writer = await asyncio.open_connection(sock=raw, limit=1024)
    try:
        extra = _UPGRADE if upgrade else ""
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n{extra}\r\n".encode())
        status = await reader.readline()
        assert status.split()[1] == (b"101" if upgrade else b"200"), status
        yield writer
    finally:
        writer.transport.abort()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def events_of(response: aiohttp.ClientResponse) -> list[dict[str, str]]:
    """Read the events of a stream to its end."""
    return parsed((await response.read()).decode())


def parsed(text: str) -> list[dict[str, str]]:
    """Parse events as a browser does; comments are left out."""
    events = []
    for block in text.split("\n\n"):
        fields: dict[str, list[str]] = {}
        for line in block.split("\n"):
            name, _, value = line.partition(":")
            if name:
                fields.setdefault(name, []).append(value.removeprefix(" "))
        if fields:
            events.append({name: "\n".join(values) for name, values in fields.items()})
    return events
