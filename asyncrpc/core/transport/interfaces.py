"""The addresses of this host: what a worker that listens everywhere tells its peers.

Asked of the kernel, never of the name service: a host name often resolves to 127.0.1.1,
to an address outside a NAT, or slowly to nothing.  Link-local IPv6 addresses are left
out, for they mean nothing without the number that the peer gives to its interface.

Source: netdevice(7), if_inet6 in proc(5).  Where neither exists (macOS), the host name
and the routing table are all we ask.
"""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import ipaddress
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from asyncrpc.errors import UsageError

IPAddress: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

_SIOCGIFFLAGS: Final = 0x8913
_SIOCGIFADDR: Final = 0x8915
_IFF_UP: Final = 1
_IFREQ_BYTES: Final = 40  # struct ifreq on 64 bits; the name takes the first 16
_NAME_BYTES: Final = 16
# Tentative, deprecated, or failed duplicate detection: not to be used for new peers.
_IPV6_UNUSABLE: Final = 0x40 | 0x20 | 0x08
_IPV6_TABLE: Final = Path("/proc/net/if_inet6")
# Bridges between containers or virtual machines of one host.
_BRIDGES: Final = (
    *("docker*", "br-*", "virbr*", "cni*", "podman*", "lxcbr*", "lxdbr*", "flannel*"),
    *("cali*", "kube-*", "veth*", "nerdctl*"),
)
# Documentation addresses (RFC 5737, RFC 3849): a route to them is the default route.
_ELSEWHERE: Final = (
    (socket.AF_INET, "198.51.100.1"),
    (socket.AF_INET6, "2001:db8::1"),
)


@dataclass(frozen=True, slots=True)
class HostAddress:
    """One address of this host, and its interface."""

    address: IPAddress
    interface: str


def host_addresses(interface: str | None = None) -> list[IPAddress]:
    """List the addresses at which peers may reach this host, best first.

    The address that the default route uses comes first, then those routed everywhere,
    then private ones.  Last are those of bridges of containers or virtual machines of
    this host, link-local ones, and loopback.

    Args:
        interface: which to list, best first: names of interfaces, which may hold `*`
            and `?`, and networks such as `10.0.0.0/8`, separated by commas; None for
            all.
    """
    usable = list(_usable())
    preferred = set(_default_sources())
    ranked = sorted(usable, key=lambda candidate: _rank(candidate, preferred))
    if interface is not None:
        patterns = _patterns(interface)
        chosen = [
            candidate for match in patterns for candidate in ranked if match(candidate)
        ]
        if not chosen:
            known = sorted(
                {f"{candidate.interface} ({candidate.address})" for candidate in usable}
            )
            raise UsageError(
                f"interface {interface!r} has no usable address; "
                f"interfaces that have one:  {', '.join(known) or 'none'}; see "
                "NetworkOptions.interface and ASYNCRPC_INTERFACE"
            )
        ranked = chosen
    return list(dict.fromkeys(candidate.address for candidate in ranked))


def usable_addresses() -> list[HostAddress]:
    """List all addresses of this host with their interfaces, in no order."""
    return list(_usable())


def _patterns(text: str) -> list[Callable[[HostAddress], bool]]:
    """Return the tests that choose addresses."""
    return [_pattern(part.strip()) for part in text.split(",") if part.strip()]


def _pattern(text: str) -> Callable[[HostAddress], bool]:
    if "/" not in text:
        return lambda candidate: fnmatch.fnmatchcase(candidate.interface, text)
    try:
        network = ipaddress.ip_network(text)
    except ValueError as error:
        raise UsageError(
            f"{text!r} is not a network such as 10.0.0.0/8: {error}"
        ) from None
    return lambda candidate: candidate.address in network


def _rank(
    candidate: HostAddress, preferred: set[IPAddress]
) -> tuple[bool, bool, bool, bool, bool, int, int]:
    address = candidate.address
    return (
        address.is_loopback,
        address.is_link_local,
        # Every host has the same: it leads others to themselves.
        any(fnmatch.fnmatchcase(candidate.interface, bridge) for bridge in _BRIDGES),
        address not in preferred,
        not address.is_global,
        address.version,
        int(address),
    )


def _usable() -> Iterator[HostAddress]:
    listed = [*_ipv4(), *_ipv6()]
    yield from listed or _by_name()


def _ipv4() -> Iterator[HostAddress]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            request = struct.pack(f"{_IFREQ_BYTES}s", name.encode()[: _NAME_BYTES - 1])
            with contextlib.suppress(OSError):  # has no IPv4 address
                flags = fcntl.ioctl(sock, _SIOCGIFFLAGS, request)
                if struct.unpack_from("H", flags, _NAME_BYTES)[0] & _IFF_UP:
                    reply = fcntl.ioctl(sock, _SIOCGIFADDR, request)
                    yield HostAddress(ipaddress.IPv4Address(reply[20:24]), name)


def _ipv6() -> Iterator[HostAddress]:
    try:
        table = _IPV6_TABLE.read_text()
    except OSError:  # no IPv6 in this kernel, or not Linux
        return
    for line in table.splitlines():
        digits, _index, _prefix, _scope, flags, name = line.split()
        address = ipaddress.IPv6Address(bytes.fromhex(digits))
        if not address.is_link_local and not int(flags, 16) & _IPV6_UNUSABLE:
            yield HostAddress(address, name)


def _by_name() -> Iterator[HostAddress]:
    for address in _default_sources():
        yield HostAddress(address, "")
    with contextlib.suppress(OSError):
        for entry in socket.getaddrinfo(socket.gethostname(), None):
            address = ipaddress.ip_address(str(entry[4][0]).partition("%")[0])
            if not address.is_link_local:
                yield HostAddress(address, "")
    yield HostAddress(ipaddress.IPv4Address("127.0.0.1"), "lo0")


def _default_sources() -> Iterator[IPAddress]:
    for family, elsewhere in _ELSEWHERE:
        # A datagram socket that connects sends nothing: it only asks the routing table.
        with (
            contextlib.suppress(OSError),
            socket.socket(family, socket.SOCK_DGRAM) as sock,
        ):
            sock.connect((elsewhere, 9))
            address = ipaddress.ip_address(sock.getsockname()[0].partition("%")[0])
            if not address.is_link_local:
                yield address
