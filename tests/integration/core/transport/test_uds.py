"""Unix sockets keep the contract of transports."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrpc.core.transport.abc import Connector
from asyncrpc.core.transport.address import Address
from asyncrpc.core.transport.uds import UdsConnector
from asyncrpc.testing.conformance import TransportConformance


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
