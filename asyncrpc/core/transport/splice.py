"""A splice: two connections made one; their bytes are not interpreted here.

Bytes from one go to the other.  A side that takes no more stops reading from the other,
so at most the water mark of a transport and one buffer lie in between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from asyncrpc.core.transport.abc import Transport
from asyncrpc.errors import TransportError

BUFFER_BYTES: Final = 256 << 10


class Splice:
    """Two transports, joined; when one ends, the other does."""

    def __init__(
        self, first: Transport, second: Transport, on_end: Callable[[Splice], None]
    ) -> None:
        self._on_end: Callable[[Splice], None] | None = on_end
        self._halves = _Half(self, first), _Half(self, second)
        self._halves[0].to, self._halves[1].to = second, first
        for half in self._halves:
            half.own.set_handler(half)
        for half in self._halves:
            half.own.resume_reading()

    def abort(self) -> None:
        """End both now."""
        for half in self._halves:
            half.own.abort()
        self.end()

    def end(self) -> None:
        """Report its end, once."""
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end(self)


class _Half:
    """The handler of one of the two."""

    def __init__(self, splice: Splice, own: Transport) -> None:
        self.own = own
        self.to = own
        self._splice = splice
        self._buffer = memoryview(bytearray(BUFFER_BYTES))

    def connection_made(self, transport: Transport) -> None:
        """Do nothing: it was made long ago."""

    def get_buffer(self, _sizehint: int, /) -> memoryview:
        """Return where the next bytes land."""
        return self._buffer

    def buffer_updated(self, nbytes: int, /) -> None:
        """Pass them on; a copy, for the transport keeps what it cannot write."""
        self.to.send((bytes(self._buffer[:nbytes]),))

    def pause_writing(self) -> None:
        """Stop reading from the other: this one takes no more."""
        self.to.pause_reading()

    def resume_writing(self) -> None:
        """Resume reading from the other."""
        self.to.resume_reading()

    def connection_lost(self, _error: TransportError | None, /) -> None:
        """End the other in order, once it has all bytes that have arrived."""
        self.to.close()
        self._splice.end()
