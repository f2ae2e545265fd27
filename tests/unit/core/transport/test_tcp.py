"""TCP: which addresses are published, how errors read, and how connections end."""

from __future__ import annotations

import asyncio
import os
import socket
import struct

import pytest

from asyncrpc.core.transport.address import Address
from asyncrpc.core.transport.interfaces import host_addresses
from asyncrpc.core.transport.sockets import user_of
from asyncrpc.core.transport.tcp import TcpConnector
from asyncrpc.errors import (
    ConnectError,
    ConnectionLostError,
    TransportError,
    UsageError,
)
from asyncrpc.testing.conformance import Acceptor, Recorder

LOOPBACK = Address("tcp", "127.0.0.1")


def published(listener_addresses: tuple[Address, ...]) -> set[str]:
    assert len({address.port for address in listener_addresses}) == 1
    assert listener_addresses[0].port
    return {address.host for address in listener_addresses}


async def test_ipv4_wildcard_publishes_every_ipv4_address() -> None:
    listener = await TcpConnector().listen(Address("tcp", "0.0.0.0"), Recorder)  # noqa: S104
    expected = {str(address) for address in host_addresses() if address.version == 4}
    assert published(listener.addresses) == expected
    assert listener.addresses[-1].is_loopback
    await listener.close()


async def test_ipv6_wildcard_publishes_both_families() -> None:
    listener = await TcpConnector().listen(Address("tcp", "::"), Recorder)
    assert published(listener.addresses) == {
        str(address) for address in host_addresses()
    }
    await listener.close()


async def test_interface_restricts_the_wildcard_and_its_bindings() -> None:
    acceptor, near = Acceptor(), Recorder()
    connector = TcpConnector(interface="lo")
    listener = await connector.listen(Address("tcp", "::"), acceptor)
    assert published(listener.addresses) == {
        str(address) for address in host_addresses("lo")
    }
    others = set(host_addresses()) - set(host_addresses("lo"))
    for host in others:
        address = Address("tcp", str(host), listener.addresses[0].port)
        with pytest.raises(ConnectError):
            await connector.connect(address, Recorder())
    await connector.connect(listener.addresses[0], near)
    await acceptor.connected(1)
    near.transport.abort()
    await near.until_lost()
    await acceptor.accepted[0].until_lost()
    await listener.close()


async def test_unknown_interface_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="eth77"):
        await TcpConnector(interface="eth77").listen(Address("tcp", "::"), Recorder)


async def test_port_in_use_is_an_error_with_advice() -> None:
    listener = await TcpConnector().listen(LOOPBACK, Recorder)
    taken = listener.addresses[0]
    with pytest.raises(TransportError, match=f"{taken}.*use port 0") as caught:
        await TcpConnector().listen(taken, Recorder)
    assert isinstance(caught.value.__cause__, OSError)
    await listener.close()
    await listener.close()


async def test_address_of_another_host_is_an_error_with_advice() -> None:
    with pytest.raises(TransportError, match="use an address of this host"):
        await TcpConnector().listen(Address("tcp", "198.51.100.1"), Recorder)


async def test_refused_connection_names_the_address() -> None:
    listener = await TcpConnector().listen(LOOPBACK, Recorder)
    gone = listener.addresses[0]
    await listener.close()
    with pytest.raises(ConnectError, match=str(gone)) as caught:
        await TcpConnector().connect(gone, Recorder())
    assert isinstance(caught.value.__cause__, OSError)


async def test_abort_is_told_from_an_orderly_end() -> None:
    acceptor, near = Acceptor(), Recorder()
    listener = await TcpConnector().listen(LOOPBACK, acceptor)
    await TcpConnector().connect(listener.addresses[0], near)
    await acceptor.connected(1)
    far = acceptor.accepted[0]
    far.transport.abort()
    await near.until_lost()
    await far.until_lost()
    assert isinstance(near.error, ConnectionLostError)
    assert "broke" in str(near.error)
    assert far.error is None
    await listener.close()


async def test_small_writes_are_not_delayed_and_dead_hosts_are_detected() -> None:
    acceptor, near = Acceptor(), Recorder()
    listener = await TcpConnector().listen(LOOPBACK, acceptor)
    transport = await TcpConnector().connect(listener.addresses[0], near)
    await acceptor.connected(1)
    for end in (transport, acceptor.accepted[0].transport):
        sock = end._socket.get_extra_info("socket")  # type: ignore[attr-defined]  # noqa: SLF001
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert transport.remote == str(listener.addresses[0]).removeprefix("tcp://")
    assert transport.credentials is None
    near.transport.close()
    await near.until_lost()
    await acceptor.accepted[0].until_lost()
    await listener.close()


async def test_peer_that_never_reads_does_not_block_a_close() -> None:
    """It is left after the linger, and the error says how much it missed."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(5)
        address = Address("tcp", "127.0.0.1", silent.getsockname()[1])
        near = Recorder()
        transport = await TcpConnector(linger_s=0.05).connect(address, near)
        accepted, _ = silent.accept()
        with accepted:
            transport.send([bytes(16 << 20)])
            transport.close()
            await near.until_lost()
    assert isinstance(near.error, ConnectionLostError)
    assert "bytes unsent" in str(near.error)


async def test_peer_that_never_closes_does_not_block_a_close() -> None:
    """Everything was taken, so the end is in order."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(5)
        address = Address("tcp", "127.0.0.1", silent.getsockname()[1])
        near = Recorder()
        transport = await TcpConnector(linger_s=0.05).connect(address, near)
        accepted, _ = silent.accept()
        with accepted:
            accepted.settimeout(5)
            transport.send([b"bye"])
            transport.close()
            await near.until_lost()
            assert accepted.recv(100) == b"bye"
            assert accepted.recv(100) == b""
    assert near.error is None


async def test_reset_is_a_lost_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(5)
        address = Address("tcp", "127.0.0.1", server.getsockname()[1])
        near = Recorder()
        await TcpConnector().connect(address, near)
        accepted, _ = server.accept()
        linger = struct.pack("ii", 1, 0)
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        accepted.close()
        await near.until_lost()
    assert isinstance(near.error, ConnectionLostError)
    assert isinstance(near.error.__cause__, OSError)


async def test_unresolvable_name_is_a_connect_error() -> None:
    with pytest.raises(ConnectError, match=r"no-such-host\.invalid"):
        async with asyncio.timeout(15):
            await TcpConnector().connect(
                Address("tcp", "no-such-host.invalid", 9), Recorder()
            )


@pytest.mark.parametrize(
    ("family", "listens", "dials"),
    [
        (socket.AF_INET, "127.0.0.1", "127.0.0.1"),
        (socket.AF_INET6, "::1", "::1"),
        (socket.AF_INET6, "::", "127.0.0.1"),  # seen as ::ffff:127.0.0.1
    ],
)
def test_user_at_the_other_end_is_known(
    family: socket.AddressFamily, listens: str, dials: str
) -> None:
    with (
        socket.create_server(
            (listens, 0), family=family, dualstack_ipv6=listens == "::"
        ) as server,
        socket.create_connection((dials, server.getsockname()[1])) as near,
        server.accept()[0] as far,
    ):
        peer, own = far.getpeername()[:2], far.getsockname()[:2]
        assert user_of(peer, own) == os.getuid()
        assert user_of((peer[0], 1), own) is None
        near.close()
        far.recv(1)
        assert user_of(peer, own) is None  # what has ended is of nobody
