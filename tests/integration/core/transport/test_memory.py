"""Memory keeps the contract of transports, on a real loop and on a simulated one."""

from __future__ import annotations

import pytest

from asyncrpc.core.transport.abc import Connector
from asyncrpc.core.transport.address import Address
from asyncrpc.core.transport.memory import MemoryHub
from asyncrpc.testing.conformance import TransportConformance
from asyncrpc.testing.loop import SimLoop


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
