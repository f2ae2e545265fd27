"""What a host publishes of itself: usable addresses, best first."""

from __future__ import annotations

import ipaddress
import socket

import pytest

from asyncrpc.core.transport import interfaces
from asyncrpc.core.transport.address import is_loopback
from asyncrpc.core.transport.interfaces import HostAddress, host_addresses
from asyncrpc.errors import UsageError


def test_loopback_comes_last_and_link_local_is_left_out() -> None:
    addresses = host_addresses()
    assert ipaddress.ip_address("127.0.0.1") in addresses
    loopback = [address.is_loopback for address in addresses]
    assert loopback == sorted(loopback)
    assert not any(
        address.is_link_local for address in addresses if address.version == 6
    )


def test_address_of_the_default_route_comes_first() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("198.51.100.1", 9))
        except OSError:
            pytest.skip("this host has no default route")
        source = ipaddress.ip_address(sock.getsockname()[0])
    assert host_addresses()[0] == source


def test_every_address_can_be_bound() -> None:
    addresses = host_addresses()
    bound = []
    for address in addresses:
        family = socket.AF_INET if address.version == 4 else socket.AF_INET6
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.bind((str(address), 0))
            bound.append(ipaddress.ip_address(sock.getsockname()[0]))
    assert bound == addresses
    assert len(set(bound)) == len(bound) > 0


def test_interface_can_be_chosen() -> None:
    addresses = host_addresses("lo")
    assert addresses
    assert all(address.is_loopback for address in addresses)


def test_unknown_interface_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(UsageError, match=r"'eth77' has no usable address.*lo"):
        host_addresses("eth77")


def address_of(interface: str, address: str) -> HostAddress:
    return HostAddress(ipaddress.ip_address(address), interface)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with two networks, containers, and no default route."""
    fake_interfaces = [
        address_of("lo", "127.0.0.1"),
        address_of("docker0", "172.17.0.1"),
        address_of("eth0", "169.254.3.4"),
        address_of("eth1", "192.168.1.5"),
        address_of("ib0", "10.20.0.7"),
    ]
    monkeypatch.setattr(interfaces, "_usable", lambda: iter(fake_interfaces))
    monkeypatch.setattr(interfaces, "_default_sources", lambda: iter(()))


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize(
    ("chosen", "addresses"),
    [
        (None, "10.20.0.7 192.168.1.5 172.17.0.1 169.254.3.4 127.0.0.1"),
        ("eth*", "192.168.1.5 169.254.3.4"),
        ("192.168.0.0/16,ib?", "192.168.1.5 10.20.0.7"),
        ("ib0, 10.0.0.0/8", "10.20.0.7"),
    ],
)
def test_addresses_are_ordered_and_chosen(chosen: str | None, addresses: str) -> None:
    assert [str(address) for address in host_addresses(chosen)] == addresses.split()


@pytest.mark.usefixtures("host")
def test_network_must_be_in_prefix_notation() -> None:
    with pytest.raises(UsageError, match=r"'10.0.0.1/8' is not a network"):
        host_addresses("10.0.0.1/8")
    with pytest.raises(UsageError, match=r"ib0 \(10.20.0.7\)"):
        host_addresses("10.30.0.0/16")


@pytest.mark.parametrize(
    ("host", "is_of_this_host"),
    [
        ("localhost", True),
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),  # as a socket of IPv6 shows a client of IPv4
        ("::1%lo", True),
        ("::ffff:10.0.0.1", False),
        ("10.0.0.1", False),
        ("0.0.0.0", False),  # noqa: S104
        ("localhost.example.org", False),
        ("", False),
    ],
)
def test_loopback_hosts_are_recognized(host: str, *, is_of_this_host: bool) -> None:
    assert is_loopback(host) is is_of_this_host
