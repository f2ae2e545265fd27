"""TCP, over IPv4 and IPv6.

Decides which sockets to listen on and which addresses to publish.  How bytes move is in
`sockets`; what they mean, above.  A listener on a wildcard address (`0.0.0.0`, or `::`
for both families) publishes every usable address of the host, for its peers may be in
different networks; an `interface` narrows it to the addresses of one.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from asyncrpc.core.host.shortage import shortage_of
from asyncrpc.core.transport.abc import Connector, Listener, StreamHandler, Transport
from asyncrpc.core.transport.accepting import keep_all
from asyncrpc.core.transport.address import Address
from asyncrpc.core.transport.endpoints import Resolver, connected_socket, reason_of
from asyncrpc.core.transport.flow import LINGER_S, WaterMarks
from asyncrpc.core.transport.handover import release_port
from asyncrpc.core.transport.interfaces import IPAddress, host_addresses
from asyncrpc.core.transport.port_protocols import Doorkeeper, Doors
from asyncrpc.core.transport.secured import TlsTransport
from asyncrpc.core.transport.sockets import SocketTransport, StreamListener
from asyncrpc.core.transport.tls import TlsContexts
from asyncrpc.errors import ConnectError, RefusedError, TransportError

# Connections that the kernel completes before we accept them: a thousand workers may
# connect to one at the same moment.  The kernel cuts it to net.core.somaxconn.
BACKLOG: Final = 4096
# Two sockets must share a port that the kernel chose for the first of them alone.
_PORT_TRIES_MAX: Final = 16


@dataclass(frozen=True)
class TcpConnector(Connector):
    """Connects and listens by TCP.

    Attributes:
        interface: for a wildcard address, listen on the addresses of this interface
            only; None for all.
        linger_s: seconds that `close` waits for the peer to read what is queued.
        marks: when `send` makes the handler hold back.
        tls: certificates, if connections are encrypted; None if not.
        resolver: looks names up.
        doors: what else is served by the same ports, by its first four bytes; read for
            each connection, so it may come later.
        make_room: closes a connection when no descriptor is left; see `SocketAcceptor`.
    """

    scheme = "tcp"
    interface: str | None = None
    linger_s: float = LINGER_S
    marks: WaterMarks = field(default_factory=WaterMarks)
    tls: TlsContexts | None = None
    resolver: Resolver = field(default_factory=Resolver, compare=False)
    doors: Doors = field(default_factory=dict, compare=False)
    make_room: Callable[[], bool] = field(default=keep_all, compare=False)

    async def listen(
        self, address: Address, accept: Callable[[], StreamHandler]
    ) -> Listener:
        """Listen at `address`; see `Connector.listen`."""
        sockets, published = await bind(address, self.interface)
        try:
            return TcpListener(
                published, sockets, lambda: self._accepted(accept()), self.make_room
            )
        except OSError as error:
            _close_all(sockets)
            raise _cannot_listen(address, error) from error

    async def connect(self, address: Address, handler: StreamHandler) -> Transport:
        """Connect to `address`; see `Connector.connect`."""
        secured = None
        if self.tls is not None:
            secured = TlsTransport(handler, self.tls, address.host)
        protocol = self._protocol(secured or handler)
        try:
            endpoints = await self.resolver.resolve(address.host, address.port)
            sock = await connected_socket(endpoints)
            await _hand_over(sock, lambda: protocol)
            if secured is not None:
                await secured.established  # the dialer has a limit; its end fails it
        except ConnectError:
            raise
        except OSError as error:
            is_refused = isinstance(error, ConnectionRefusedError)
            kind = RefusedError if is_refused else ConnectError
            why = reason_of(error)
            raise kind(f"cannot connect to {address}: {why}") from error
        except asyncio.CancelledError:
            protocol.forsake()  # it may have been made in this very turn of the loop
            raise
        return secured or protocol

    def _accepted(self, handler: StreamHandler) -> SocketTransport:
        if self.tls is not None:
            handler = TlsTransport(handler, self.tls, None)
        return self._protocol(
            Doorkeeper(handler, self.doors) if self.doors else handler
        )

    def _protocol(self, handler: StreamHandler) -> SocketTransport:
        return SocketTransport(
            handler, scheme="tcp", marks=self.marks, linger_s=self.linger_s
        )


async def _hand_over(sock: socket.socket, make: Callable[[], SocketTransport]) -> None:
    """Give a connected socket to the loop."""
    try:
        await asyncio.get_running_loop().create_connection(make, sock=sock)
    except BaseException:
        sock.close()
        raise


class TcpListener(StreamListener):
    """One or more listening TCP sockets that share a port."""


async def bind(
    address: Address, interface: str | None
) -> tuple[list[socket.socket], tuple[Address, ...]]:
    """Listen at `address`; return the sockets, and the addresses that lead to them.

    Args:
        address: where; port 0 asks the system for one.
        interface: for a wildcard address, the one interface to listen on; None: all.
    """
    try:
        hosts = await _resolve(address, interface)
        try:
            sockets = _bind_all(hosts, address.port)
        except OSError as error:
            in_use = error.errno == errno.EADDRINUSE and address.port
            if not in_use or not await release_port(address.port):
                raise
            sockets = _bind_all(hosts, address.port)
    except OSError as error:
        raise _cannot_listen(address, error) from error
    port = sockets[0].getsockname()[1]
    return sockets, _published(address, hosts, port, interface)


async def _resolve(address: Address, interface: str | None) -> list[IPAddress]:
    """Return the addresses to bind."""
    entries = await asyncio.get_running_loop().getaddrinfo(
        address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    hosts = [ipaddress.ip_address(entry[4][0]) for entry in entries]
    hosts = list(dict.fromkeys(hosts))
    if interface is None or not hosts[0].is_unspecified:
        return hosts
    return _reached_by(hosts[0], host_addresses(interface))


def _reached_by(wildcard: IPAddress, addresses: Iterable[IPAddress]) -> list[IPAddress]:
    """Keep what a socket bound to `wildcard` accepts: `::` is both families."""
    return [
        address for address in addresses if wildcard.version in (6, address.version)
    ]


def _published(
    address: Address, hosts: list[IPAddress], port: int, interface: str | None
) -> tuple[Address, ...]:
    """Turn the bound addresses into addresses that peers can use."""
    if interface is None and hosts[0].is_unspecified:
        hosts = _reached_by(hosts[0], host_addresses())
    return tuple(Address(address.scheme, str(host), port) for host in hosts)


def _bind_all(hosts: list[IPAddress], port: int) -> list[socket.socket]:
    """Bind a socket to each host, all on one port; 0 lets the kernel choose it."""
    for _ in range(_PORT_TRIES_MAX):
        try:
            return _bind_once(hosts, port)
        except OSError as error:
            if port or len(hosts) == 1 or error.errno != errno.EADDRINUSE:
                raise
    raise OSError(errno.EADDRINUSE, f"no port is free on all of {hosts}")


def _bind_once(hosts: list[IPAddress], port: int) -> list[socket.socket]:
    sockets: list[socket.socket] = []
    try:
        for host in hosts:
            sockets.append(_bind(host, port))
            port = sockets[0].getsockname()[1]
    except BaseException:
        _close_all(sockets)
        raise
    return sockets


def _bind(host: IPAddress, port: int) -> socket.socket:
    family = socket.AF_INET if host.version == 4 else socket.AF_INET6  # noqa: PLR2004
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.settimeout(0)
        # Connections of a former listener may still be closing; take the port over.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            is_dual_stack = host.is_unspecified
            sock.setsockopt(
                socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(not is_dual_stack)
            )
        sock.bind((str(host), port))
        # Two listeners may bind one port with SO_REUSEADDR; only one can listen.
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


def _close_all(sockets: Iterable[socket.socket]) -> None:
    for sock in sockets:
        sock.close()


def _cannot_listen(address: Address, error: OSError) -> TransportError:
    reason = shortage_of(error) or error.strerror or os.strerror(error.errno or 0)
    advice = ""
    if error.errno == errno.EADDRINUSE:
        advice = "; stop what listens there, or use port 0 to get a free one"
    elif error.errno == errno.EADDRNOTAVAIL:
        advice = "; use an address of this host, or tcp://0.0.0.0:0 for all of them"
    return TransportError(f"cannot listen at {address}: {reason}{advice}")
