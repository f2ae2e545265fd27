"""Sockets, memory and a simulated network keep the contract of transports."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrpc.core.transport.abc import Connector
from asyncrpc.core.transport.address import Address
from asyncrpc.core.transport.memory import MemoryHub
from asyncrpc.core.transport.tcp import TcpConnector
from asyncrpc.core.transport.uds import UdsConnector
from asyncrpc.testing.conformance import TransportConformance
from asyncrpc.testing.loop import SimLoop
from asyncrpc.testing.network import Network


class TestTcpOverIPv4(TransportConformance):
    host = "127.0.0.1"

    def connector(self) -> Connector:
        return TcpConnector()

    def address(self) -> Address:
        return Address("tcp", self.host)


@pytest.mark.skipif(not socket.has_ipv6, reason="this host has no IPv6")
class TestTcpOverIPv6(TestTcpOverIPv4):
    host = "::1"


class TestTcpEverywhere(TestTcpOverIPv4):
    host = "::"


class TestUnixSockets(TransportConformance):
    directory: Path

    @pytest.fixture(autouse=True)
    def short_directory(self) -> Iterator[None]:
        # Not tmp_path: with the test's name in it, the path is too long for a socket.
        with tempfile.TemporaryDirectory(prefix="arpc-") as directory:
            self.directory = Path(directory)
            yield

    def connector(self) -> Connector:
        return UdsConnector()

    def address(self) -> Address:
        return Address("uds", str(self.directory / "worker.sock"))


class TestMemory(TransportConformance):
    hub: MemoryHub

    @pytest.fixture(autouse=True)
    def fresh_hub(self) -> None:
        self.hub = MemoryHub()

    def connector(self) -> Connector:
        return self.hub.connector()

    def address(self) -> Address:
        return Address("mem", "ps")


class TestMemoryInVirtualTime(TestMemory):
    loops = {"sim": SimLoop}  # noqa: RUF012  (read once, by the conftest)


class TestSimulatedNetwork(TransportConformance):
    loops = {"sim": SimLoop}  # noqa: RUF012  (read once, by the conftest)
    network: Network

    @pytest.fixture(autouse=True)
    def fresh_network(self) -> None:
        self.network = Network(seed=1)

    def connector(self) -> Connector:
        return self.network.connector("server")

    def dialler(self) -> Connector:
        return self.network.connector("client")

    def address(self) -> Address:
        return Address("mem", "ps")


class TestSimulatedNetworkThatLosesPackets(TestSimulatedNetwork):
    @pytest.fixture(autouse=True)
    def bad_link(self, fresh_network: None) -> None:
        self.network.between("server", "client").lose(0.2)
