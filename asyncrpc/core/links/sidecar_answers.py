"""A worker whose loop runs answers queries to its sidecar itself.

Peers ask at its port, as they dial it.  If its loop does not run, it does not accept,
and the sidecar process answers: see `asyncrpc.core.sidecar.process`.
"""

from __future__ import annotations

import asyncio
from typing import Final

from asyncrpc.core.sidecar import pulse, query
from asyncrpc.core.transport.abc import Transport
from asyncrpc.errors import TransportError

# Without a query, or not closed by the client.  The oldest goes: a client sends its
# query at once, and needs a connection for one round trip.
CONNECTIONS_MAX: Final = 64
CONNECTION_S: Final = 2.0  # a client sends its query at once


class SidecarAnswers:
    """Answers queries for one worker."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, incarnation: int, secret: bytes | None
    ) -> None:
        """Prepare.

        Args:
            incarnation: of the worker; queries for others are not answered.
        """
        self._loop = loop
        self.incarnation = incarnation
        self.key = query.key_from(secret, incarnation)
        self._open: dict[Inquiry, asyncio.TimerHandle] = {}

    def make(self) -> Inquiry:
        """Return the handler of one connection."""
        return Inquiry(self)

    def begin(self, inquiry: Inquiry, transport: Transport) -> None:
        """Limit the time of a connection; without room for it, end the oldest."""
        if len(self._open) >= CONNECTIONS_MAX:
            oldest = next(iter(self._open))
            self.end(oldest)
            oldest.abort()
        timer = self._loop.call_later(CONNECTION_S, transport.abort)
        self._open[inquiry] = timer

    def end(self, inquiry: Inquiry) -> None:
        """Make room: a connection has ended."""
        timer = self._open.pop(inquiry, None)
        if timer is not None:
            timer.cancel()

    def close(self) -> None:
        """Stop the timers."""
        for inquiry in tuple(self._open):
            self.end(inquiry)
            inquiry.abort()


class Inquiry:
    """A connection of a peer that asks about this worker."""

    def __init__(self, answers: SidecarAnswers) -> None:
        self._answers = answers
        self._record = bytearray(query.QUERY_BYTES)
        self._read = 0
        self._transport: Transport | None = None

    def connection_made(self, transport: Transport) -> None:
        """Begin."""
        self._transport = transport
        self._answers.begin(self, transport)

    def get_buffer(self, _sizehint: int, /) -> memoryview:
        """Return the place of missing bytes; of surplus bytes, any place."""
        view = memoryview(self._record)
        return view[self._read :] if self._read < len(view) else view

    def buffer_updated(self, nbytes: int, /) -> None:
        """Answer a query once it is whole; end on anything else.

        The client closes the connection, so that no port stays in TIME_WAIT here.
        """
        self._read += nbytes
        if self._read < query.QUERY_BYTES or self._transport is None:
            return
        answers, record = self._answers, bytes(self._record)
        nonce = query.read_query(answers.key, answers.incarnation, record)
        if nonce is None or self._read > query.QUERY_BYTES:
            self._transport.abort()
            return
        key, incarnation = answers.key, answers.incarnation
        answer = query.pack_answer(key, incarnation, nonce, pulse.TICKING)
        self._transport.send((answer,))

    def abort(self) -> None:
        """End now."""
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, _error: TransportError | None, /) -> None:
        """Make room for another."""
        self._answers.end(self)

    def pause_writing(self) -> None:
        """Do nothing: an answer is 56 bytes."""

    def resume_writing(self) -> None:
        """Do nothing."""
