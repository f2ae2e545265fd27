"""TLS keeps the contract of transports, on asyncio's loop and on uvloop's."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrpc.testing.conformance import TransportConformance
from asyncrpc.transport.abc import Connector
from asyncrpc.transport.address import Address
from asyncrpc.transport.tcp import TcpConnector
from asyncrpc.transport.tls import TlsContexts
from tests.certificates import Authority


class TestTls(TransportConformance):
    @pytest.fixture(autouse=True)
    def _contexts(self, tmp_path: Path) -> None:
        self.contexts = TlsContexts(Authority(tmp_path).tls())

    def connector(self) -> Connector:
        return TcpConnector(tls=self.contexts)

    def address(self) -> Address:
        return Address("tcp", "127.0.0.1")
