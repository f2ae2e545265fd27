"""Doors: the protocols of one listening port, told apart by their first four bytes.

A worker listens at one port.  Most connections speak the protocol of calls, or TLS;
others begin with another magic, such as a query to the sidecar.  The handler of the
usual door is made when the connection is accepted, so that strangers are counted and
limited from then on.

Only the first read of a connection passes here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

from asyncrpc.core.transport.abc import StreamHandler, Transport
from asyncrpc.errors import TransportError

MAGIC_BYTES: Final = 4

Doors: TypeAlias = Mapping[bytes, Callable[[], StreamHandler]]


class Doorkeeper:
    """Reads the first bytes of an accepted connection, and gives it to its handler."""

    def __init__(self, usual: StreamHandler, doors: Doors) -> None:
        self._usual = usual
        self._doors = doors
        self._bytes = bytearray(MAGIC_BYTES)
        self._read = 0
        self._transport: Transport | None = None

    def connection_made(self, transport: Transport) -> None:
        """Tell the usual handler: it counts connections."""
        self._transport = transport
        self._usual.connection_made(transport)

    def get_buffer(self, _sizehint: int, /) -> memoryview:
        """Return the place of the first bytes that are missing."""
        return memoryview(self._bytes)[self._read :]

    def buffer_updated(self, nbytes: int, /) -> None:
        """Choose the handler once it is clear which one is meant."""
        self._read += nbytes
        beginning = bytes(self._bytes[: self._read])
        transport = self._transport
        assert transport is not None
        if beginning in self._doors:
            self._usual.connection_lost(None)
            other = self._doors[beginning]()
            transport.set_handler(other)
            other.connection_made(transport)
            _give(other, beginning)
        elif not any(magic.startswith(beginning) for magic in self._doors):
            transport.set_handler(self._usual)
            _give(self._usual, beginning)

    def connection_lost(self, error: TransportError | None, /) -> None:
        """Pass it on."""
        self._usual.connection_lost(error)

    def pause_writing(self) -> None:
        """Pass it on."""
        self._usual.pause_writing()

    def resume_writing(self) -> None:
        """Pass it on."""
        self._usual.resume_writing()


def _give(handler: StreamHandler, beginning: bytes) -> None:
    unread = memoryview(beginning)
    while unread:
        place = memoryview(handler.get_buffer(len(unread)))
        nbytes = min(len(place), len(unread))
        place[:nbytes] = unread[:nbytes]
        handler.buffer_updated(nbytes)
        unread = unread[nbytes:]
