"""Addresses: which a host publishes, how names are looked up, and which one wins."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from asyncrpc.core.transport import endpoints, interfaces
from asyncrpc.core.transport.address import Address, is_loopback
from asyncrpc.core.transport.dial import Dialled, connect_any
from asyncrpc.core.transport.endpoints import (
    LOOKUPS_MAX,
    Endpoint,
    Resolver,
    connected_socket,
    reason_of,
)
from asyncrpc.core.transport.interfaces import HostAddress, host_addresses
from asyncrpc.core.transport.race import STAGGER_S
from asyncrpc.errors import ConnectError, UsageError
from asyncrpc.testing.conformance import Acceptor, Recorder
from asyncrpc.testing.loop import SimLoop
from asyncrpc.testing.network import Network

PS = tuple(Address("mem", f"ps-{index}") for index in range(3))


class World:
    """Three hosts that listen, each with one address of the peer."""

    def __init__(self) -> None:
        self.network = Network(seed=1)
        self.connectors = {"mem": self.network.connector("a")}
        self.acceptors = [Acceptor() for _ in PS]
        self.handlers: list[Recorder] = []

    async def listen(self, *indices: int) -> None:
        for index in indices:
            self.network.between("a", f"host-{index}").delay(0.0)
            connector = self.network.connector(f"host-{index}")
            await connector.listen(PS[index], self.acceptors[index])

    def handler(self) -> Recorder:
        self.handlers.append(Recorder())
        return self.handlers[-1]

    async def dial(self) -> Dialled[Recorder]:
        return await connect_any(PS, self.handler, self.connectors)

    def cut(self, index: int) -> None:
        self.network.between("a", f"host-{index}").partition()


class TestDialling:
    loops = {"sim": SimLoop}  # noqa: RUF012  (read once, by the conftest)

    async def test_first_address_is_preferred(self) -> None:
        world = World()
        await world.listen(0, 1, 2)
        dialled = await world.dial()
        assert dialled.address == PS[0]
        assert dialled.handler is world.handlers[0]
        assert dialled.transport is dialled.handler.transport
        assert len(world.handlers) == 1
        assert asyncio.get_running_loop().time() == 0

    async def test_failed_address_starts_the_next_at_once(self) -> None:
        world = World()
        await world.listen(2)
        dialled = await world.dial()
        assert dialled.address == PS[2]
        assert asyncio.get_running_loop().time() < STAGGER_S

    async def test_silent_address_starts_the_next_after_the_stagger(self) -> None:
        world = World()
        await world.listen(0, 1, 2)
        world.cut(0)
        dialled = await world.dial()
        assert dialled.address == PS[1]
        assert asyncio.get_running_loop().time() == pytest.approx(STAGGER_S)

    async def test_each_silent_address_costs_one_stagger(self) -> None:
        world = World()
        await world.listen(0, 1, 2)
        world.cut(0)
        world.cut(1)
        dialled = await world.dial()
        assert dialled.address == PS[2]
        assert asyncio.get_running_loop().time() == pytest.approx(2 * STAGGER_S)

    async def test_losing_connections_are_closed(self) -> None:
        world = World()
        await world.listen(0, 1)
        for index in (0, 1):  # both answer at about the same time
            world.network.between("a", f"host-{index}").clog(1.0)
        dialled = await world.dial()
        await asyncio.sleep(60)
        begun = [handler for handler in world.handlers if handler.events]
        assert [handler for handler in begun if not handler.lost] == [dialled.handler]

    async def test_failed_addresses_are_listed_with_their_reasons(self) -> None:
        world = World()
        with pytest.raises(ConnectError) as caught:
            await world.dial()
        for address in PS:
            assert f"{address}: cannot connect" in str(caught.value)
        assert isinstance(caught.value.__cause__, ConnectError)

    async def test_address_of_an_unknown_scheme_is_skipped(self) -> None:
        world = World()
        await world.listen(0)
        addresses = (Address("tcp", "127.0.0.1", 1), PS[0])
        dialled = await connect_any(addresses, world.handler, world.connectors)
        assert dialled.address == PS[0]
        with pytest.raises(
            ConnectError, match="no connector for this scheme; there are: mem"
        ):
            await connect_any(addresses[:1], world.handler, world.connectors)

    async def test_empty_list_of_addresses_is_an_error(self) -> None:
        with pytest.raises(ConnectError, match="none of its addresses can be used"):
            await connect_any((), Recorder, {})

    async def test_cancellation_ends_every_attempt(self) -> None:
        world = World()
        await world.listen(0, 1, 2)
        for index in range(3):
            world.cut(index)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(10):
                await world.dial()
        for index in range(3):
            world.network.between("a", f"host-{index}").heal()
        await asyncio.sleep(60)
        assert [handler.events for handler in world.handlers] == [[], [], []]

    async def test_bug_in_the_factory_is_not_hidden(self) -> None:
        def broken() -> Recorder:
            raise UsageError("no handler today")

        world = World()
        with pytest.raises(UsageError, match="no handler today"):
            await connect_any(PS, broken, world.connectors)


@pytest.fixture
def listening() -> Iterator[Endpoint]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield Endpoint(*server.getsockname())


def closed() -> Endpoint:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return Endpoint(*server.getsockname())


async def test_numeric_addresses_are_not_looked_up() -> None:
    assert await Resolver().resolve("10.0.0.1", 7) == [Endpoint("10.0.0.1", 7)]
    assert str(Endpoint("::1", 7)) == "[::1]:7"


async def test_unresolvable_name_is_an_error_of_the_lookup() -> None:
    with pytest.raises(socket.gaierror) as caught:
        await Resolver().resolve("a" * 70 + ".x", 1)
    assert reason_of(caught.value).startswith("the name does not resolve")


async def test_hanging_lookup_can_be_cancelled_and_shared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever gives up is free; who asks for the same name joins the lookup."""
    answer, looked_up = threading.Event(), []

    def look_up(host: str) -> list[str]:
        looked_up.append(host)
        answer.wait(30.0)
        return ["10.0.0.9"]

    monkeypatch.setattr(endpoints, "_addresses_of", look_up)
    resolver = Resolver()
    first = asyncio.create_task(resolver.resolve("slow", 1))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    second = asyncio.create_task(resolver.resolve("slow", 2))
    await asyncio.sleep(0)
    answer.set()
    assert await second == [Endpoint("10.0.0.9", 2)]
    assert looked_up == ["slow"]


async def test_lookups_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = threading.Event()
    most, now, lock = 0, 0, threading.Lock()

    def look_up(host: str) -> list[str]:
        nonlocal most, now
        with lock:
            now += 1
            most = max(most, now)
        answer.wait(30.0)
        with lock:
            now -= 1
        return [host]

    monkeypatch.setattr(endpoints, "_addresses_of", look_up)
    resolver = Resolver()
    names = [f"host-{number}" for number in range(3 * LOOKUPS_MAX)]
    tasks = [asyncio.create_task(resolver.resolve(name, 1)) for name in names]
    await asyncio.sleep(0)
    answer.set()
    endpoints_found = await asyncio.gather(*tasks)
    assert [endpoint.host for (endpoint,) in endpoints_found] == names
    assert most <= LOOKUPS_MAX


async def test_refusing_address_gives_way_at_once(listening: Endpoint) -> None:
    with await connected_socket([closed(), listening]) as sock:
        assert sock.getpeername() == (listening.host, listening.port)


async def test_silent_address_gives_way_after_the_stagger(listening: Endpoint) -> None:
    with ExitStack() as stack:
        deaf = stack.enter_context(socket.socket())
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        for _ in range(3):  # its queue is full with these
            caller = stack.enter_context(socket.socket())
            caller.settimeout(0)
            caller.connect_ex(deaf.getsockname())
        silent = Endpoint(*deaf.getsockname())
        with await connected_socket([silent, listening]) as sock:
            assert sock.getpeername() == (listening.host, listening.port)


async def test_refusing_addresses_are_all_listed() -> None:
    first, other = closed(), closed()
    with pytest.raises(ConnectionRefusedError) as caught:
        await connected_socket([first, other])
    for endpoint in {first, other}:
        assert f"{endpoint}: refused: no process listens there" in reason_of(
            caught.value
        )


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.EHOSTUNREACH, "No route to host"), "no route (No route to"),
        (ConnectionResetError(errno.ECONNRESET, "reset"), "cut off (reset)"),
        (TimeoutError(), "silent: no answer"),
        (OSError(errno.EACCES, "Permission denied"), "Permission denied"),
        (ValueError("no"), "no"),
    ],
)
def test_reasons_are_in_words(error: Exception, words: str) -> None:
    assert reason_of(error).startswith(words)


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
