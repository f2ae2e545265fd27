"""Addresses: `tcp://host:port`, `tcp://[v6]:port`, `uds:///path`, `mem://name`.

An address is a value that travels: workers publish every address at which they can be
reached, and a peer tries those it can use.
"""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from asyncrpc.core.arguments import wrong
from asyncrpc.errors import UsageError

SCHEMES: Final = ("tcp", "uds", "mem", "relay")
PORT_MAX: Final = 0xFFFF


def is_loopback(host: str) -> bool:
    """Return whether a host name or an IP address leads to this host alone."""
    try:
        ip_address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host == "localhost"
    mapped = getattr(ip_address, "ipv4_mapped", None)
    return bool((mapped or ip_address).is_loopback)


@dataclass(frozen=True, slots=True, order=True)
class Address:
    """Where a worker can be reached.

    Attributes:
        scheme: one of `SCHEMES`.
        host: host name or IP address for `tcp`, path for `uds`, any name for `mem`;
            for `relay`, the gateway through which the worker is reached.
        port: for `tcp`; 0 asks the system for one.  0 for the others.
    """

    scheme: str
    host: str
    port: int = 0

    def __str__(self) -> str:
        if self.scheme != "tcp":
            return f"{self.scheme}://{self.host}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Return whether only this host can reach it."""
        return self.scheme != "tcp" or is_loopback(self.host)

    @property
    def network(self) -> str:
        """Return the usual network of an IP address; empty for anything else.

        Only its host knows the real length of the prefix: /24 for IPv4 and /64 for IPv6
        are usual.
        """
        try:
            ip_address = ipaddress.ip_address(self.host.partition("%")[0])
        except ValueError:
            return ""
        bits = 24 if ip_address.version == 4 else 64  # noqa: PLR2004
        return str(ipaddress.ip_network((ip_address, bits), strict=False))

    @classmethod
    def parse_all(cls, texts: Iterable[str]) -> list[Address]:
        """Read what a peer says its addresses are; leave out what is none."""
        addresses = []
        for text in texts:
            with contextlib.suppress(UsageError):
                addresses.append(cls.parse(text))
        return addresses

    @classmethod
    def parse(cls, text: str, name: str = "an address") -> Address:
        """Read an address."""
        scheme, separator, rest = text.partition("://")
        if not separator or scheme not in SCHEMES or not rest:
            raise wrong(name, "tcp://host:port, uds:///path or mem://name", text)
        if scheme != "tcp":
            return cls(scheme, rest)
        host, colon, port = rest.rpartition(":")
        is_number = port.isascii() and port.isdigit()
        if not colon or not is_number or int(port) > PORT_MAX:
            wanted = f"tcp://host:port with a port from 0 to {PORT_MAX}"
            raise wrong(name, wanted, text)
        return cls(scheme, host.removeprefix("[").removesuffix("]"), int(port))
