"""TCP keeps the contract of transports, over IPv4 and IPv6."""

from __future__ import annotations

import socket

import pytest

from asyncrpc.testing.conformance import TransportConformance
from asyncrpc.transport.abc import Connector
from asyncrpc.transport.address import Address
from asyncrpc.transport.tcp import TcpConnector


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
