"""Admission: accepted connections that have not introduced themselves yet.

They cost memory and a descriptor each, and anyone who reaches the port can make them.
So their number and their time are limited.  At the first limit the *oldest* one that
has proved nothing is closed: a flood of silent connections then ends itself, while a
worker that belongs here needs a few milliseconds to prove it.  A connection that has
proved itself is never closed for a stranger.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Final, Protocol

from asyncrpc.errors import (
    AsyncRpcError,
    AuthenticationError,
    ConnectError,
    RemoteProtocolError,
    UsageError,
)
from asyncrpc.runtime.counters import Counters
from asyncrpc.runtime.ports import Identity
from asyncrpc.transport.address import Address
from asyncrpc.wire.messages import Hello

logger = logging.getLogger("asyncrpc")

# A flood of strangers must not become a flood of log lines.
LOGGED_EVERY_S: Final = 1.0


class Stranger(Protocol):
    """A connection that has been accepted.

    Attributes:
        opened: done once it is open; fails if it ends before.
    """

    opened: asyncio.Future[Hello]

    @property
    def has_proved(self) -> bool:
        """Return whether it has proved that it knows the secret, if there is one."""

    @property
    def where(self) -> str:
        """The other end, for people to read."""

    def fail(self, error: AsyncRpcError) -> None:
        """Abort the connection because of `error`."""


class Admission:
    """The connections of one worker that have not introduced themselves."""

    def __init__(
        self,
        identity: Identity,
        loop: asyncio.AbstractEventLoop,
        counters: Counters,
        *,
        handshakes_max: int,
        timeout_s: float,
    ) -> None:
        """Prepare.

        Args:
            identity: of the worker.
            loop: has the timers.
            counters: count what was refused.
            handshakes_max: how many may wait at a time.
            timeout_s: seconds that each has to introduce itself.
        """
        self._identity = identity
        self._loop = loop
        self._counters = counters
        self._handshakes_max = handshakes_max
        self._timeout_s = timeout_s
        self._waiting: dict[Stranger, asyncio.TimerHandle] = {}  # the oldest first
        self._unlogged = 0
        self._quiet_until_s = 0.0

    def __len__(self) -> int:
        """Count the connections that have not introduced themselves."""
        return len(self._waiting)

    def admit(self, connection: Stranger) -> None:
        """Admit a connection that has just been accepted, for a while."""
        if len(self._waiting) >= self._handshakes_max:
            self._make_room(connection)
        self._waiting[connection] = self._loop.call_later(
            self._timeout_s, self._expire, connection
        )
        connection.opened.add_done_callback(partial(self._settle, connection))

    def _make_room(self, newest: Stranger) -> None:
        unproved = (one for one in self._waiting if not one.has_proved)
        self._drop(
            next(unproved, newest),
            f"{len(self._waiting)} connections have not authenticated, and "
            "more arrive; see LimitOptions.handshakes_max",
        )

    def _expire(self, connection: Stranger) -> None:
        if connection.opened.done():  # just in time: `_settle` runs in this turn
            return
        self._drop(
            connection,
            f"{connection.where} did not introduce itself in {self._timeout_s:g} s",
        )

    def _drop(self, connection: Stranger, why: str) -> None:
        timer = self._waiting.pop(connection, None)
        if timer is not None:
            timer.cancel()
        self._counters.connections_dropped_unauthenticated += 1
        connection.fail(ConnectError(why))

    def _settle(self, connection: Stranger, opened: asyncio.Future[object]) -> None:
        """Record that a connection is open, or has ended before."""
        timer = self._waiting.pop(connection, None)
        if timer is not None:
            timer.cancel()
        error = None if opened.cancelled() else opened.exception()
        if isinstance(error, AuthenticationError):
            self._counters.authentications_failed += 1
            self._log(error)
        elif isinstance(error, RemoteProtocolError):
            self._counters.handshakes_refused += 1
            self._log(error)

    def _log(self, error: AsyncRpcError) -> None:
        now_s = self._loop.time()
        if now_s < self._quiet_until_s:
            self._unlogged += 1
            return
        self._quiet_until_s = now_s + LOGGED_EVERY_S
        more = f" ({self._unlogged} more before it)" if self._unlogged else ""
        self._unlogged = 0
        logger.warning(
            "worker %r refused a connection%s: %s", self._identity.name, more, error
        )


def check_listen_address(address: Address, *, is_guarded: bool) -> None:
    """Refuse to serve strangers.

    Raises:
        UsageError: others can reach the address, and need neither a secret nor a
            certificate.
    """
    if address.scheme == "tcp" and not is_guarded:
        raise UsageError(
            f"refusing to listen at {address} without a secret: anyone who reaches it "
            "could run code here. Set ASYNCRPC_SECRET, or Options(secret=...), to the "
            "same value on every worker; or verify their certificates, with "
            "Options(tls=Tls(ca=...)); or listen at a Unix socket (uds://)"
        )
