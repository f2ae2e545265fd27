"""Routes: where a worker listens, and the addresses at which it reaches others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

from asyncrpc.runtime.host import HOST_ID
from asyncrpc.runtime.members import Member
from asyncrpc.runtime.options import Options
from asyncrpc.transport.abc import Connector, StreamHandler
from asyncrpc.transport.address import Address
from asyncrpc.transport.dial import Dialled, connect_any
from asyncrpc.transport.tcp import TcpConnector
from asyncrpc.transport.tls import open_tls
from asyncrpc.transport.uds import UdsConnector

HandlerT = TypeVar("HandlerT", bound=StreamHandler)

_PREFERENCE: Final = {"mem": 0, "uds": 1, "tcp": 2}


def open_connectors(
    options: Options, network: Connector | None
) -> dict[str, Connector]:
    """Return what connects and listens, by scheme.

    Args:
        options: the interface, and the certificates.
        network: an in-process network to use instead of sockets.

    Raises:
        UsageError: there are no such certificates.
    """
    if network is not None:
        return {network.scheme: network}
    return {
        "tcp": TcpConnector(
            interface=options.network.interface, tls=open_tls(options.tls)
        ),
        "uds": UdsConnector(),
    }


def default_addresses(sockets: Path, *, is_guarded: bool) -> list[str]:
    """Return where a worker listens by default.

    Args:
        sockets: a directory of its own for Unix sockets.
        is_guarded: whether strangers are kept away; then at every interface, too.
    """
    where = [f"uds://{sockets / 'worker'}"]
    if is_guarded:
        has_ipv6 = Path("/proc/net/if_inet6").exists()
        where.append("tcp://[::]:0" if has_ipv6 else "tcp://0.0.0.0:0")
    return where


class Routes:
    """The ways of one worker to the others.

    Attributes:
        timeout_s: seconds that a dial and its handshake may take.
    """

    def __init__(
        self, connectors: Mapping[str, Connector], *, timeout_s: float
    ) -> None:
        """Prepare.

        Args:
            connectors: by scheme; read at each dial, so they may come later.
            timeout_s: seconds that a dial and its handshake may take.
        """
        self._connectors = connectors
        self.timeout_s = timeout_s

    def to(self, member: Member) -> list[Address]:
        """Return the addresses of a worker that this one can use, best first."""
        found = []
        is_here = member.host_id in ("", HOST_ID)
        for text in member.addresses:
            address = Address.parse(text)
            if address.scheme not in self._connectors:
                continue
            if not is_here and (address.scheme == "uds" or address.is_loopback):
                continue
            found.append(address)
        return sorted(found, key=lambda address: _PREFERENCE[address.scheme])

    async def connect(
        self, addresses: Sequence[Address], make: Callable[[], HandlerT]
    ) -> Dialled[HandlerT]:
        """Connect to the first address that answers; see `transport.dial`."""
        return await connect_any(addresses, make, self._connectors)
