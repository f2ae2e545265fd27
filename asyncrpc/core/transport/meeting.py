"""The TCP address of a rendezvous: whether it is this host's, and which end answers.

A process of the host at the address may host the rendezvous: the first one that gets
the port.  The others only need to know that a process listens.

A name may stand for one host, which has several addresses, or for several hosts, as a
headless service of Kubernetes does.  In the second case no host can know from the name
alone whether it is meant.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from asyncrpc.core.transport.endpoints import (
    Endpoint,
    Resolver,
    connected_socket,
    is_numeric,
)

_BACKLOG: Final = 4096
_KNOCK_MAX_S: Final = 5.0  # for one attempt: a host that is starting may be silent


@dataclass(frozen=True, slots=True)
class ResolvedName:
    """What a name stands for now.

    Attributes:
        endpoints: all of them.
    """

    endpoints: tuple[Endpoint, ...]
    local: tuple[Endpoint, ...]

    @property
    def is_here(self) -> bool:
        """Return whether it stands for this host alone."""
        return len(self.local) == len(self.endpoints) > 0


@dataclass(slots=True)
class MeetingAddress:
    """The address of a rendezvous.

    Attributes:
        host: a name, or an address in digits.
        resolver: looks the name up, every time anew.
    """

    host: str
    port: int
    resolver: Resolver = field(default_factory=Resolver)

    def __str__(self) -> str:
        return str(Endpoint(self.host, self.port))

    async def look(self, limit_s: float) -> ResolvedName:
        """Return what the name stands for now."""
        try:
            async with asyncio.timeout(limit_s):
                endpoints = tuple(await self.resolver.resolve(self.host, self.port))
        except TimeoutError:
            silent = "the name service is silent"
            raise socket.gaierror(socket.EAI_AGAIN, silent) from None
        local = tuple(endpoint for endpoint in endpoints if _is_local(endpoint))
        return ResolvedName(endpoints, local)

    async def knock(self, endpoints: Sequence[Endpoint], limit_s: float) -> Endpoint:
        """Return the endpoint at which a process listens."""
        async with asyncio.timeout(min(limit_s, _KNOCK_MAX_S)):
            sock = await connected_socket(endpoints)
        try:
            host, port = sock.getpeername()[:2]
        finally:
            sock.close()
        return next(
            (
                endpoint
                for endpoint in endpoints
                if endpoint.host.partition("%")[0] == host
            ),
            Endpoint(host, port),
        )

    def bind(self) -> int | None:
        """Listen at the port; return the descriptor of the socket.

        If the host was given in digits, only at this address: what is hosted there
        does not authenticate its clients.
        """
        loopback = self.host == "localhost"
        only = self.host if is_numeric(self.host) and _is_local_ip(self.host) else None
        try:
            return _listen(only or ("127.0.0.1" if loopback else ""), self.port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return None
            raise


def _is_local(endpoint: Endpoint) -> bool:
    return _is_local_ip(endpoint.host)


def _is_local_ip(host: str) -> bool:
    """Return whether an address is one of this host's: only those can be bound."""
    ip_address = ipaddress.ip_address(host.partition("%")[0])
    if ip_address.is_unspecified:
        return True
    family = socket.AF_INET if ip_address.version == 4 else socket.AF_INET6  # noqa: PLR2004
    try:
        info = socket.getaddrinfo(host, 0, family, flags=socket.AI_NUMERICHOST)
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.bind(info[0][4])
    except OSError:
        return False
    return True


def _listen(host: str, port: int) -> int:
    """Listen at an address in digits, or everywhere; return the descriptor."""
    if ":" in host or (not host and socket.has_dualstack_ipv6()):
        try:
            return socket.create_server(
                (host, port),
                family=socket.AF_INET6,
                backlog=_BACKLOG,
                dualstack_ipv6=not host,
            ).detach()
        except OSError as error:
            if host or error.errno == errno.EADDRINUSE:
                raise  # else IPv6 is switched off
    return socket.create_server((host, port), backlog=_BACKLOG).detach()
