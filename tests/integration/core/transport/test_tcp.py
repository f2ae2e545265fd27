"""TCP keeps the contract of transports, over IPv4 and IPv6."""

from __future__ import annotations

import socket

import pytest

from asyncrpc.core.transport.abc import Connector
from asyncrpc.core.transport.address import Address
from asyncrpc.core.transport.tcp import TcpConnector
from asyncrpc.testing.conformance import TransportConformance


class TestTcpOverIPv4(TransportConformance):
    def connector(self) -> Connector:
        return TcpConnector()

    def address(self) -> Address:
        return Address("tcp", "127.0.0.1")


@pytest.mark.skipif(not socket.has_ipv6, reason="this host has no IPv6")
class TestTcpOverIPv6(TransportConformance):
    def connector(self) -> Connector:
        return TcpConnector()

    def address(self) -> Address:
        return Address("tcp", "::1")


class TestTcpEverywhere(TransportConformance):
    def connector(self) -> Connector:
        return TcpConnector()

    def address(self) -> Address:
        return Address("tcp", "::")
