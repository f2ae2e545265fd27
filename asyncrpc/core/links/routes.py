"""Routes: where a worker listens, and the addresses at which it reaches others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeVar

from asyncrpc.core.host.this_host import HOST_ID
from asyncrpc.core.members import Member
from asyncrpc.core.options import Options
from asyncrpc.core.transport.abc import Connector, StreamHandler
from asyncrpc.core.transport.accepting import keep_all
from asyncrpc.core.transport.address import Address
from asyncrpc.core.transport.dial import Dialled, connect_any
from asyncrpc.core.transport.port_protocols import Doors
from asyncrpc.core.transport.tcp import TcpConnector
from asyncrpc.core.transport.tls import open_tls
from asyncrpc.core.transport.uds import UdsConnector

HandlerT = TypeVar("HandlerT", bound=StreamHandler)

RACE_SHARE: Final = 0.8  # of the time of a dial: for connecting
NETWORKS_MAX: Final = 64  # that are remembered because they led to a worker
_PREFERENCE: Final = {"mem": 0, "uds": 1, "tcp": 2, "relay": 3}
_HOW_TO_LISTEN: Final = (
    "without a secret a worker listens for its own host only: give all workers the "
    "same secret, in ASYNCRPC_SECRET_FILE or Options(secret=...), or let them use TLS"
)


def open_connectors(
    options: Options,
    network: Connector | None,
    doors: Doors = MappingProxyType({}),
    make_room: Callable[[], bool] = keep_all,
) -> dict[str, Connector]:
    """Return what connects and listens, by scheme."""
    if network is not None:
        return {network.scheme: network}
    return {
        "tcp": TcpConnector(
            interface=options.network.interface,
            tls=open_tls(options.tls),
            doors=doors,
            make_room=make_room,
        ),
        "uds": UdsConnector(make_room=make_room),
    }


def default_addresses(sockets: Path, *, is_guarded: bool) -> list[str]:
    """Return where a worker listens by default.

    Args:
        is_guarded: whether connections must authenticate; then it listens at every
            interface as well.
    """
    where = [f"uds://{sockets / 'worker'}"]
    if is_guarded:
        has_ipv6 = Path("/proc/net/if_inet6").exists()
        where.append("tcp://[::]:0" if has_ipv6 else "tcp://0.0.0.0:0")
    return where


class Routes:
    """The ways of one worker to the others.

    A host with two networks publishes an address of each, and one of them may be dead.
    The first dial finds out which, by a race; the network that worked is tried first
    from then on, for every peer that has an address in it.

    Attributes:
        timeout_s: seconds that a dial and its handshake may take.
        gateway: addresses by which all others are reached; None: each by its own.
        own_name: of the worker, which reaches itself directly.
    """

    def __init__(
        self, connectors: Mapping[str, Connector], *, timeout_s: float
    ) -> None:
        """Prepare.

        Args:
            connectors: by scheme; read at each dial, so they may come later.
        """
        self._connectors = connectors
        self._worked: dict[str, int] = {}  # networks, and when: the latest last
        self._wins = 0
        self.gateway: tuple[Address, ...] | None = None
        self.own_name = ""
        self.timeout_s = timeout_s

    def to(self, member: Member) -> list[Address]:
        """Return the addresses of a worker that this one can use, best first."""
        if self.gateway is not None and member.name != self.own_name:
            return list(self.gateway)
        usable = [
            address
            for address in Address.parse_all(member.addresses)
            if not self._why_not(address, member)
        ]
        return sorted(usable, key=self._rank)

    def _rank(self, address: Address) -> tuple[int, int]:
        worked = self._worked.get(address.network, 0)
        return _PREFERENCE[address.scheme], -worked

    def _why_not(self, address: Address, member: Member) -> str:
        """Return why an address of a worker is of no use here; empty if it is."""
        if address.scheme == "relay":
            return f"worker {address.host!r} passes its connections on"
        if address.scheme not in self._connectors:
            return "this worker has no transport for it"
        is_here = member.host_id in ("", HOST_ID)
        if is_here:
            return ""
        if address.scheme == "uds":
            of_it = "a socket in the file system of another host"
            if all(address.startswith("uds://") for address in member.addresses):
                of_it += f", and {member.name!r} listens at no port; {_HOW_TO_LISTEN}"
            return of_it
        return "the loopback of another host" if address.is_loopback else ""

    def passed_over(self, member: Member) -> str:
        """Return which addresses of a worker are not tried, each with its reason."""
        parsed = Address.parse_all(member.addresses)
        reasons = {address: self._why_not(address, member) for address in parsed}
        return "; ".join(f"{address}: {why}" for address, why in reasons.items() if why)

    async def connect(
        self, addresses: Sequence[Address], make: Callable[[], HandlerT]
    ) -> Dialled[HandlerT]:
        """Connect to the first address that answers; see `transport.dial`."""
        # The rest of the time is left to the handshake.
        limit_s = RACE_SHARE * self.timeout_s
        return await connect_any(addresses, make, self._connectors, limit_s=limit_s)

    def worked(self, address: Address) -> None:
        """Take note that a worker has been found at an address."""
        network = address.network
        if not network:
            return
        self._wins += 1
        self._worked.pop(network, None)
        self._worked[network] = self._wins
        if len(self._worked) > NETWORKS_MAX:
            del self._worked[next(iter(self._worked))]
