"""Admission: accepted connections that have not introduced themselves yet.

They cost memory and a descriptor each, and anyone who reaches the port can make them.
So their number and their time are limited; they never have more than a quarter of the
descriptors that the process may have.  At the first limit the *oldest* one that has
said nothing is closed, or else the oldest that has proved nothing: a flood of silent
connections then ends itself, while a worker that belongs here speaks at once, and needs
a few milliseconds to prove it.  A connection that has proved itself is never closed for
a stranger.  When no descriptor is left at all, one is closed for each that arrives.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Final

from asyncrpc.core.counters import Counters
from asyncrpc.core.host.shortage import descriptors_max
from asyncrpc.core.identity import WorkerIdentity
from asyncrpc.core.links.connection import Connection
from asyncrpc.core.logs import LogLimit
from asyncrpc.core.options import Options
from asyncrpc.core.transport.address import Address, is_loopback
from asyncrpc.core.transport.interfaces import host_addresses
from asyncrpc.errors import (
    AuthenticationError,
    ConnectError,
    RemoteProtocolError,
    UsageError,
)

logger = logging.getLogger("asyncrpc")

# Strangers have one in so many of the descriptors: the others are for members, files
# and shared memory.
DESCRIPTORS_SHARE: Final = 4
# What people type has fewer; what `openssl rand` and `secrets` make has more.
SECRET_CHARACTERS_MIN: Final = 16


class Admission:
    """The connections of one worker that have not introduced themselves."""

    def __init__(
        self,
        identity: WorkerIdentity,
        loop: asyncio.AbstractEventLoop,
        counters: Counters,
        *,
        handshakes_max: int,
        timeout_s: float,
    ) -> None:
        self._identity = identity
        self._loop = loop
        self._counters = counters
        self._handshakes_max = handshakes_max
        self._timeout_s = timeout_s
        self._waiting: dict[Connection, asyncio.TimerHandle] = {}  # the oldest first
        self._log_limit = LogLimit()

    def __len__(self) -> int:
        """Count the connections that have not introduced themselves."""
        return len(self._waiting)

    def admit(self, connection: Connection) -> None:
        """Admit a connection that has just been accepted, for a while."""
        if len(self._waiting) >= self._limit():
            self._make_room(connection)
        self._waiting[connection] = self._loop.call_later(
            self._timeout_s, self._expire, connection
        )
        connection.opened.add_done_callback(partial(self._settle, connection))

    def make_room(self) -> bool:
        """Close a connection, as no descriptor is left; return whether there was one.

        Its descriptor is free in a later turn of the loop.
        """
        oldest = self._oldest()
        if oldest is not None:
            self._drop(oldest, "no file descriptor is left here for strangers")
        return oldest is not None

    def _limit(self) -> int:
        share = descriptors_max() // DESCRIPTORS_SHARE
        return min(self._handshakes_max, max(1, share))

    def _make_room(self, newest: Connection) -> None:
        waiting, limit = len(self._waiting), self._limit()
        why = f"{waiting} connections have not authenticated, and more arrive; "
        if limit < self._handshakes_max:
            why += (
                f"handshakes_max is {self._handshakes_max}, but only {limit} of the "
                f"{descriptors_max()} file descriptors of this process are for them: "
                "raise its limit, `ulimit -n`"
            )
        else:
            why += "see LimitOptions.handshakes_max"
        self._drop(self._oldest() or newest, why)
        self._log("closed", why)

    def _oldest(self) -> Connection | None:
        """Return the connection that is closed next, if one of them may be."""
        unproved = [stranger for stranger in self._waiting if not stranger.has_proved]
        silent = (
            stranger
            for stranger in unproved
            if not (stranger.reads or stranger.stream.has_begun)
        )
        return next(silent, next(iter(unproved), None))

    def _expire(self, connection: Connection) -> None:
        if connection.opened.done():  # just in time: `_settle` runs in this turn
            return
        self._drop(
            connection,
            f"{connection.where} did not introduce itself in {self._timeout_s:g} s",
        )

    def _drop(self, connection: Connection, why: str) -> None:
        timer = self._waiting.pop(connection, None)
        if timer is not None:
            timer.cancel()
        self._counters.connections_dropped_unauthenticated += 1
        connection.fail(ConnectError(why))

    def _settle(self, connection: Connection, opened: asyncio.Future[object]) -> None:
        """Record that a connection is open, or has ended before."""
        timer = self._waiting.pop(connection, None)
        if timer is not None:
            timer.cancel()
        error = None if opened.cancelled() else opened.exception()
        if isinstance(error, AuthenticationError):
            self._counters.authentications_failed += 1
            self._log("refused", error)
        elif isinstance(error, RemoteProtocolError):
            self._counters.handshakes_refused += 1
            self._log("refused", error)

    def _log(self, action: str, why: object) -> None:
        more = self._log_limit.left_out(action, self._loop.time())
        if more is not None:
            name = self._identity.name
            logger.warning("worker %r %s a connection%s: %s", name, action, more, why)


def check_listen_address(address: Address, options: Options) -> None:
    """Refuse to serve strangers, or those that guess the secret."""
    if address.scheme != "tcp":
        return
    if not options.is_guarded:
        raise UsageError(
            f"refusing to listen at {address} without a secret: anyone who reaches it "
            "could run code here. Set ASYNCRPC_SECRET, or Options(secret=...), to the "
            "same value on every worker; or verify their certificates, with "
            "Options(tls=Tls(ca=...)); or listen at a Unix socket (uds://)"
        )
    secret = options.secret_bytes
    is_vouched = options.tls is not None and options.tls.vouches_for_peers
    if secret is None or len(secret) >= SECRET_CHARACTERS_MIN or is_vouched:
        return
    if not _is_of_this_host(address, options.network.interface):
        raise UsageError(
            f"refusing to listen at {address} with a secret of {len(secret)} "
            f"characters, which others could guess: give all workers one of at least "
            f"{SECRET_CHARACTERS_MIN}, such as `openssl rand -hex 32` makes, or listen "
            'for this host only, NetworkOptions(listen=("tcp://127.0.0.1:0",))'
        )


def warn_of_short_secret(name: str, secret: bytes | None) -> None:
    """Say so if a worker's secret can be guessed."""
    if secret is not None and len(secret) < SECRET_CHARACTERS_MIN:
        logger.warning(
            "worker %r: its secret has %d characters: whoever reads a connection, or "
            "listens where a worker dials, could guess it; use at least %d random "
            "ones, such as `openssl rand -hex 32` makes",
            name,
            len(secret),
            SECRET_CHARACTERS_MIN,
        )


def _is_of_this_host(address: Address, interface: str | None) -> bool:
    if interface is not None and address.host in {"::", "0.0.0.0"}:  # noqa: S104
        return all(address.is_loopback for address in host_addresses(interface))
    return is_loopback(address.host)
