"""Admission: connections that have been accepted and not yet introduced themselves.

They cost memory and a descriptor each, and whoever reaches the port can make them.  So
there is a limit of their number and of their time.  At the first limit the *oldest*
that has proved nothing goes: a flood of silent connections then ends itself, while a
worker that belongs here needs a few milliseconds to prove it.  One that has proved
itself is never put out for a stranger.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Final

from asyncrpc.errors import (
    AsyncRpcError,
    AuthenticationError,
    ConnectError,
    RemoteProtocolError,
    UsageError,
)
from asyncrpc.runtime.links.connection import Connection, ConnectionState
from asyncrpc.transport.address import Address

if TYPE_CHECKING:
    from asyncrpc.runtime.worker import Worker

logger = logging.getLogger("asyncrpc")

# A flood of strangers must not become a flood of lines.
LOGGED_EVERY_S: Final = 1.0


class Admission:
    """The strangers at one worker's door."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._waiting: dict[Connection, asyncio.TimerHandle] = {}  # the oldest first
        self._unlogged = 0
        self._quiet_until_s = 0.0

    def __len__(self) -> int:
        """Count the connections that have not introduced themselves."""
        return len(self._waiting)

    def admit(self, connection: Connection) -> None:
        """Take in a connection that has just been accepted, for a while."""
        options = self._worker.options
        if len(self._waiting) >= options.handshakes_max:
            self._make_room(connection)
        limit_s = options.handshake_timeout_s
        self._waiting[connection] = self._worker.loop.call_later(
            limit_s, self._expire, connection, limit_s
        )
        connection.opened.add_done_callback(partial(self._settle, connection))

    def _make_room(self, newest: Connection) -> None:
        unproved = (
            one for one in self._waiting if one.state is ConnectionState.HANDSHAKE
        )
        self._drop(
            next(unproved, newest),
            f"{len(self._waiting)} connections have not authenticated, and there are "
            "more; see Options.handshakes_max",
        )

    def _expire(self, connection: Connection, limit_s: float) -> None:
        if connection.opened.done():  # just in time: `_settle` comes in this turn
            return
        self._drop(
            connection,
            f"{connection.where} did not introduce itself in {limit_s:g} s",
        )

    def _drop(self, connection: Connection, why: str) -> None:
        timer = self._waiting.pop(connection, None)
        if timer is not None:
            timer.cancel()
        self._worker.counters.connections_dropped_unauthenticated += 1
        connection.fail(ConnectError(why))

    def _settle(self, connection: Connection, opened: asyncio.Future[object]) -> None:
        """Take note that a connection is open, or has ended before."""
        timer = self._waiting.pop(connection, None)
        if timer is not None:
            timer.cancel()
        error = None if opened.cancelled() else opened.exception()
        if isinstance(error, AuthenticationError):
            self._worker.counters.authentications_failed += 1
            self._log(error)
        elif isinstance(error, RemoteProtocolError):
            self._worker.counters.handshakes_refused += 1
            self._log(error)

    def _log(self, error: AsyncRpcError) -> None:
        now_s = self._worker.loop.time()
        if now_s < self._quiet_until_s:
            self._unlogged += 1
            return
        self._quiet_until_s = now_s + LOGGED_EVERY_S
        more = f" ({self._unlogged} more before it)" if self._unlogged else ""
        self._unlogged = 0
        logger.warning(
            "worker %r refused a connection%s: %s", self._worker.name, more, error
        )


def check_listen_address(address: Address, *, is_guarded: bool) -> None:
    """Refuse to serve strangers.

    Raises:
        UsageError: the address can be reached by others, who need neither a secret nor
            a certificate.
    """
    if address.scheme == "tcp" and not is_guarded:
        raise UsageError(
            f"refusing to listen at {address} without a secret: anybody who reaches it "
            "could run code here. Set ASYNCRPC_SECRET, or Options(secret=...), to the "
            "same value on every worker; or verify their certificates, with "
            "Options(tls=Tls(ca=...)); or listen at a Unix socket (uds://)"
        )
