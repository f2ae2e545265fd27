"""The simulated network keeps the contract of transports, in virtual time."""

from __future__ import annotations

import pytest

from asyncrpc.core.transport.abc import Connector
from asyncrpc.core.transport.address import Address
from asyncrpc.testing.conformance import TransportConformance
from asyncrpc.testing.loop import SimLoop
from asyncrpc.testing.network import Network


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
