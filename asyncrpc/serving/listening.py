"""Serves a small application of asyncrpc at a port while a block runs.

Anyone who reaches the port can connect, in a process whose descriptors a worker needs.
So connections are limited: to make room, the oldest without a request is closed.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

from aiohttp import web

from asyncrpc.core.arguments import check_count, check_kind
from asyncrpc.core.host.shortage import descriptors_max, shortage_of
from asyncrpc.core.transport.address import Address, is_loopback
from asyncrpc.core.transport.sockets import StreamListener
from asyncrpc.core.transport.tcp import bind
from asyncrpc.errors import TransportError, UsageError

logger = logging.getLogger("asyncrpc")

_PORT_MAX: Final = 65_535
_LOCAL_HOST: Final = re.compile(
    r"(localhost|127(\.[0-9]{1,3}){3}|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE
)
_END_S: Final = 1.0  # for requests that are being answered
CONNECTIONS_MAX: Final = 256  # and a quarter of the descriptors that there may be


def check_where(host: object, port: object) -> None:
    """Raise UsageError unless these are a host and a port to listen at."""
    check_count("port", port, at_most=_PORT_MAX)
    check_kind("host", host, str, "an address, or an empty string")


def names_this_host(request: web.Request) -> bool:
    """Return whether a request names this host as the one that it is for.

    A foreign page whose name resolves to this host sends that name.
    """
    return _LOCAL_HOST.fullmatch(request.host) is not None


@web.middleware
async def _of_this_host(request: web.Request, handler: Any) -> web.StreamResponse:
    """Refuse what a foreign page may ask of a port at loopback."""
    if not names_this_host(request):
        text = "this port is for its own host: ask it as localhost or 127.0.0.1"
        raise web.HTTPForbidden(text=text)
    response: web.StreamResponse = await handler(request)
    return response


@asynccontextmanager
async def listening(
    used: str, app: web.Application, host: str, port: int, *, guards: bool = False
) -> AsyncIterator[int]:
    """Serve an application; the value of the context is the port.

    Args:
        host: address of the interface to listen at; an empty string: all of them.
        port: to listen at; 0: a free one.
    """
    connections = _HttpConnections()
    app.middlewares.insert(0, connections.count)
    if is_loopback(host) and not guards:
        app.middlewares.insert(1, _of_this_host)
    # Each request that is not HTTP is logged: by our logger, whose lines are bounded.
    runner = web.AppRunner(app, access_log=None, logger=logger, shutdown_timeout=_END_S)
    listener: StreamListener | None = None
    try:
        await runner.setup()
        connections.server = runner.server
        try:
            sockets, addresses = await bind(Address("tcp", host or "::", port), None)
            listener = StreamListener(
                addresses, sockets, connections.make, connections.make_room
            )
        except (TransportError, OSError, UnicodeError) as error:  # no host name: third
            reason = shortage_of(error) or error
            raise UsageError(
                f"{used} cannot listen at port {port} of host {host[:255]!r}: "
                f"{reason}; the port is in use, needs more privileges, or the address "
                "is not of this host"
            ) from error
        yield addresses[0].port
    finally:
        if listener is not None:
            await listener.close()
        await runner.cleanup()


class _HttpConnections:
    """The connections to one application.

    Attributes:
        server: makes and knows them, the oldest first.
    """

    def __init__(self) -> None:
        self.server: web.Server | None = None
        self._asking: dict[asyncio.BaseProtocol, int] = {}  # requests under way

        @web.middleware
        async def count(request: web.Request, handler: Any) -> web.StreamResponse:
            protocol = request.protocol
            self._asking[protocol] = self._asking.get(protocol, 0) + 1
            try:
                response: web.StreamResponse = await handler(request)
                return response
            finally:
                self._asking[protocol] -= 1
                if not self._asking[protocol]:
                    del self._asking[protocol]

        self.count = count

    def make(self) -> asyncio.BaseProtocol:
        """Return the protocol of a connection that has just been accepted."""
        server = self.server
        assert server is not None
        limit = min(CONNECTIONS_MAX, max(1, descriptors_max() // 4))
        if len(server.connections) >= limit and not self.make_room():
            return _Refusal()
        return server()

    def make_room(self) -> bool:
        """Close the oldest connection without a request, if there is one."""
        server = self.server
        for protocol in () if server is None else server.connections:
            transport = protocol.transport
            if protocol not in self._asking and transport is not None:
                protocol.force_close()
                transport.abort()
                return True
        return False


class _Refusal(asyncio.Protocol):
    """Ends a connection for which there is no room."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """End it."""
        assert isinstance(transport, asyncio.Transport)
        transport.abort()
