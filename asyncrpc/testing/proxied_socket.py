"""One of the two sockets of a connection through a proxy.

It does not use asyncio's streams: if a wait of a stream is cancelled in the same loop
iteration in which the connection breaks, its exception is never retrieved, and the loop
logs that.  Here tasks wait for events.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, cast

READ_BYTES: Final = 64 << 10
_HELD_MAX: Final = 2 * READ_BYTES  # received and unread bytes


class ProxiedSocket(asyncio.Protocol):
    """Received bytes, and whether more can be sent."""

    def __init__(self, on_made: Callable[[ProxiedSocket], None] | None = None) -> None:
        self._on_made = on_made
        self._transport: asyncio.Transport | None = None
        self._held = bytearray()
        self._has_news = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._is_paused = False
        self._is_at_end = False
        self._is_lost = False
        self._error: Exception | None = None

    # --- what the loop calls ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Note that the socket is connected."""
        self._transport = cast(asyncio.Transport, transport)
        # So that `drain` waits until the kernel has everything.
        self._transport.set_write_buffer_limits(high=0)
        if self._on_made is not None:
            self._on_made(self)

    def data_received(self, data: bytes) -> None:
        """Take received bytes."""
        self._held += data
        self._has_news.set()
        if len(self._held) > _HELD_MAX and not self._is_paused:
            self._is_paused = True
            self._get_transport().pause_reading()

    def eof_received(self) -> bool:
        """Note the end of the stream; the other direction stays open."""
        self._is_at_end = True
        self._has_news.set()
        return True

    def pause_writing(self) -> None:
        """Note that the kernel takes no more now."""
        self._has_room.clear()

    def resume_writing(self) -> None:
        """Note that the kernel has taken everything."""
        self._has_room.set()

    def connection_lost(self, error: Exception | None) -> None:
        """Note that the connection has ended."""
        self._is_at_end = self._is_lost = True
        self._error = error
        self._has_news.set()
        self._has_room.set()

    # --- what the passage calls ---

    @property
    def is_closing(self) -> bool:
        """Return whether nothing more can be written."""
        return self._is_lost or self._get_transport().is_closing()

    async def read(self) -> bytes:
        """Return received bytes, 64 KiB at most; empty at the end of the stream."""
        while not self._held and not self._is_at_end:
            self._has_news.clear()
            await self._has_news.wait()
        if not self._held and self._error is not None:
            raise self._error
        chunk = bytes(self._held[:READ_BYTES])
        del self._held[:READ_BYTES]
        if self._is_paused and len(self._held) <= _HELD_MAX and not self.is_closing:
            self._is_paused = False
            self._get_transport().resume_reading()
        return chunk

    def write(self, piece: bytes | memoryview) -> None:
        """Send bytes, or keep them until there is room."""
        self._get_transport().write(piece)

    async def drain(self) -> None:
        """Wait until the kernel has everything."""
        await self._has_room.wait()
        if self._is_lost:
            raise ConnectionResetError("the receiver is gone")

    def write_eof(self) -> None:
        """Send no more."""
        self._get_transport().write_eof()

    def abort(self) -> None:
        """End the connection at once."""
        self._get_transport().abort()

    def get_extra_info(self, name: str) -> object:
        """Return a property of the transport, such as its `socket`."""
        return self._get_transport().get_extra_info(name)

    def _get_transport(self) -> asyncio.Transport:
        assert self._transport is not None  # the socket is not shared before
        return self._transport
