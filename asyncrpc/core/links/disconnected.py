"""Stands in for the transport of a broken connection, until another one is there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from asyncrpc.core.transport.abc import (
    Buffer,
    PeerCredentials,
    StreamHandler,
    Transport,
)
from asyncrpc.core.transport.flow import WaterMarks
from asyncrpc.errors import AsyncRpcError, ConnectionLostError, TransportError

# What may be written to a connection that is broken: messages, for payloads wait.
DISCONNECTED_BYTES_MAX: Final = 64 << 20


class Discard:
    """The handler of a transport that has been replaced: what arrives is dropped."""

    def __init__(self) -> None:
        self._scratch = memoryview(bytearray(1 << 10))

    def connection_made(self, transport: Transport) -> None:
        """Do nothing: it was made long ago."""

    def get_buffer(self, _sizehint: int = -1, /) -> memoryview:
        """Return where bytes are thrown away."""
        return self._scratch

    def buffer_updated(self, nbytes: int, /) -> None:
        """Throw them away."""

    def connection_lost(self, error: TransportError | None, /) -> None:
        """Do nothing: its end is not awaited."""

    def pause_writing(self) -> None:
        """Do nothing: nothing is written."""

    def resume_writing(self) -> None:
        """Do nothing: nothing is written."""


class DisconnectedTransport(Transport):
    """Takes the bytes that are sent while there is no other transport.

    It only counts: the connection keeps everything that has not been acknowledged.
    """

    def __init__(
        self,
        handler: StreamHandler,
        was: Transport,
        fail: Callable[[AsyncRpcError], None],
    ) -> None:
        self._handler = handler
        self._fail = fail
        self._remote = was.remote
        self._scheme = was.scheme
        self._credentials = was.credentials
        self._loop = asyncio.get_running_loop()
        self._bytes = 0
        self._ended = False

    @property
    def remote(self) -> str:
        """Where the other end was."""
        return self._remote

    @property
    def scheme(self) -> str:
        """As of the transport that has broken."""
        return self._scheme

    @property
    def credentials(self) -> PeerCredentials | None:
        """As of the transport that has broken."""
        return self._credentials

    def send(self, buffers: Sequence[Buffer]) -> None:
        """Count bytes that must be sent later; too many end the connection."""
        self._bytes += sum(map(len, buffers))
        if self._bytes > DISCONNECTED_BYTES_MAX and not self._ended:
            self._fail(
                ConnectionLostError(
                    f"more than {DISCONNECTED_BYTES_MAX} bytes of messages wait for a "
                    f"connection to {self._remote}"
                )
            )

    @property
    def queued_bytes(self) -> int:
        """Return 0: nothing is queued here."""
        return 0

    def pause_reading(self) -> None:
        """Do nothing: nothing is read."""

    def resume_reading(self) -> None:
        """Do nothing: nothing is read."""

    def use_marks(self, marks: WaterMarks) -> None:
        """Do nothing: nothing is queued."""

    def set_handler(self, handler: StreamHandler) -> None:
        """Tell another handler of the end."""
        self._handler = handler

    def close(self) -> None:
        """End; tell the handler."""
        if not self._ended:
            self._ended = True
            self._loop.call_soon(self._lost)

    def _lost(self) -> None:
        self._handler.connection_lost(None)

    def abort(self) -> None:
        """End; tell the handler."""
        self.close()
