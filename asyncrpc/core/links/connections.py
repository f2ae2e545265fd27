"""The connections of one worker: how they begin, whom they trust, how they end."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass

from asyncrpc.core.identity import WorkerIdentity
from asyncrpc.core.links.connection import Connection
from asyncrpc.core.links.sinks import SILENT
from asyncrpc.core.links.tokens import Tokens
from asyncrpc.core.loop.spin import Spinner
from asyncrpc.core.wire.frames import Hello
from asyncrpc.core.wire.handshake import NONCE_BYTES, Handshake, Role
from asyncrpc.core.wire.limits import MessageLimits
from asyncrpc.errors import AsyncRpcError, AuthenticationError, ClosedError


@dataclass(frozen=True, slots=True)
class ConnectionSettings:
    """What all connections of a worker have in common.

    Attributes:
        secret: that both ends must prove to know; None: there is no secret.
        limits: of what is read.
        make_buffer: returns memory for so many bytes of a payload.
        random_bytes: returns so many unpredictable bytes.
        spinner: polls for what comes after a write, if the worker wants that.
        tokens: admit workers that do not know the secret.
    """

    secret: bytes | None
    limits: MessageLimits
    make_buffer: Callable[[int], memoryview]
    random_bytes: Callable[[int], bytes]
    spinner: Spinner | None = None
    tokens: Tokens | None = None


class Connections:
    """Makes the connections of one worker, and knows the live ones.

    Attributes:
        is_closing: whether no further connection is wanted.
        on_lost: told of the end of each.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        loop: asyncio.AbstractEventLoop,
        settings: ConnectionSettings,
    ) -> None:
        self.is_closing = False
        self.on_lost: Callable[[Connection, AsyncRpcError | None], None] | None = None
        self._identity = identity
        self._loop = loop
        self._settings = settings
        # A set, but ordered: in a simulation runs must not depend on addresses.
        self._live: dict[Connection, None] = {}

    @property
    def live(self) -> Collection[Connection]:
        """The connections that have a transport and have not ended."""
        return self._live.keys()

    def make(
        self,
        role: Role,
        introduce: Callable[[Connection], None],
        on_hello: Callable[[Connection, Hello], None],
        *,
        is_cautious: bool = False,
    ) -> Connection:
        """Make a connection that is ended with the others."""
        settings = self._settings
        tokens = settings.tokens
        own = None if tokens is None or role is Role.ACCEPTOR else tokens.own
        handshake = Handshake(
            role,
            settings.secret if own is None else own.key,
            settings.random_bytes(NONCE_BYTES),
            ticket=b"" if own is None else own.ticket,
            key_of=None if tokens is None else tokens.key_of,
            is_cautious=is_cautious,
        )
        connection = Connection(
            handshake,
            loop=self._loop,
            limits=settings.limits,
            make_buffer=settings.make_buffer,
            poller=settings.spinner,
            introduce=introduce,
            on_hello=on_hello,
        )
        connection.on_lost = self._on_lost
        # Not before there is a transport: what never had one never ends either.
        connection.on_made = self._on_made
        return connection

    def _on_made(self, connection: Connection) -> None:
        self._live[connection] = None

    def _on_lost(self, connection: Connection, error: AsyncRpcError | None) -> None:
        self._live.pop(connection, None)
        if self.on_lost is not None:
            self.on_lost(connection, error)

    def is_trusted(self, connection: Connection) -> bool:
        """Check the peer's user, as the kernel states it, where there is no secret."""
        credentials = connection.credentials
        if self._settings.secret or credentials is None:
            return True
        if credentials.uid == os.getuid():
            return True
        connection.fail(
            AuthenticationError(
                f"the peer runs as user {credentials.uid}, this worker as "
                f"{os.getuid()}; workers of different users need a secret"
            )
        )
        return False

    def refuse(self, connection: Connection, verdict: str) -> None:
        """Tell the dialer why it is refused, and end."""
        connection.hello(self._identity.hello(verdict=verdict))
        connection.open_to(SILENT)
        connection.close()

    async def close(self, timeout_s: float) -> None:
        """End every connection, in order where the peer still listens."""
        self.is_closing = True
        for connection in tuple(self._live):
            connection.close()
        ended = [connection.ended for connection in tuple(self._live)]
        if ended:
            await asyncio.wait(ended, timeout=timeout_s)
        for connection in tuple(self._live):
            connection.fail(ClosedError("the worker is shut down"))
        unended = [connection.ended for connection in tuple(self._live)]
        if unended:
            await asyncio.wait(unended, timeout=1.0)
