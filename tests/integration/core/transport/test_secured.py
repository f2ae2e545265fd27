"""TLS keeps the contract of transports, on asyncio's loop and on uvloop's."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from asyncrpc.core.transport.abc import Connector
from asyncrpc.core.transport.address import Address
from asyncrpc.core.transport.tcp import TcpConnector
from asyncrpc.core.transport.tls import TlsContexts
from asyncrpc.errors import AuthenticationError, ConnectError, ConnectionLostError
from asyncrpc.testing.conformance import LIMIT_S, Recorder, TransportConformance
from tests.certificates import Authority


class TestTls(TransportConformance):
    @pytest.fixture(autouse=True)
    def _contexts(self, tmp_path: Path) -> None:
        self.contexts = TlsContexts(Authority(tmp_path).tls())

    def connector(self) -> Connector:
        return TcpConnector(tls=self.contexts)

    def address(self) -> Address:
        return Address("tcp", "127.0.0.1")


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


class OtherEnd:
    """The accepting end of one TLS connection, as Python's own TLS makes it."""

    def __init__(self, authority: Authority) -> None:
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(authority.issue())
        self._met: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = (
            asyncio.get_running_loop().create_future()
        )

    @asynccontextmanager
    async def listening(self, *, with_tls: bool = True) -> AsyncIterator[Address]:
        server = await asyncio.start_server(
            lambda reader, writer: self._met.set_result((reader, writer)),
            *("127.0.0.1", 0),
            ssl=self.context if with_tls else None,
        )
        try:
            yield Address("tcp", "127.0.0.1", server.sockets[0].getsockname()[1])
        finally:
            server.close()
            if self._met.done():
                self._met.result()[1].transport.abort()
            await asyncio.sleep(0.05)  # TLS of Python ends in its own time

    async def met(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.wait_for(self._met, LIMIT_S)


def below(writer: asyncio.StreamWriter) -> socket.socket:
    """Return the socket below TLS, which loops give nobody."""
    return socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno()))


async def test_tls_end_without_close_notify_is_a_cut(authority: Authority) -> None:
    """Otherwise an attacker in the path could end a stream early."""
    other, near = OtherEnd(authority), Recorder()
    connector = TcpConnector(tls=TlsContexts(authority.tls()))
    async with other.listening() as address:
        await connector.connect(address, near)
        _, writer = await other.met()
        writer.write(b"some")
        await near.until_received(4)
        with below(writer) as sock:
            sock.shutdown(socket.SHUT_WR)  # a FIN, and no close_notify
        await near.until_lost()
    assert isinstance(near.error, ConnectionLostError)
    assert "without TLS's close alert" in str(near.error)


async def test_changed_bytes_end_the_connection(authority: Authority) -> None:
    other, near = OtherEnd(authority), Recorder()
    connector = TcpConnector(tls=TlsContexts(authority.tls()))
    async with other.listening() as address:
        await connector.connect(address, near)
        _, writer = await other.met()
        forged = b"\x17\x03\x03\x00\x20" + bytes(32)  # a record under no key
        with below(writer) as sock:
            sock.send(forged)
        await near.until_lost()
    assert isinstance(near.error, ConnectionLostError)
    assert "DECRYPTION_FAILED_OR_BAD_RECORD_MAC" in str(near.error)
    assert not near.received


async def test_silent_tls_handshake_can_be_cancelled(authority: Authority) -> None:
    other, near = OtherEnd(authority), Recorder()
    connector = TcpConnector(tls=TlsContexts(authority.tls()))
    async with other.listening(with_tls=False) as address:
        connecting = asyncio.create_task(connector.connect(address, near))
        reader, writer = await other.met()
        assert (await reader.readexactly(1)) == b"\x16"
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting
        while await reader.read(4096):  # it has let go
            pass
        writer.close()
    assert near.events == []


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
async def test_peer_without_tls_is_named(authority: Authority, answer: bytes) -> None:
    other, near = OtherEnd(authority), Recorder()
    connector = TcpConnector(tls=TlsContexts(authority.tls()))
    async with other.listening(with_tls=False) as address:
        connecting = asyncio.create_task(connector.connect(address, near))
        reader, writer = await other.met()
        await reader.readexactly(1)
        writer.write(answer)
        writer.close()
        with pytest.raises(ConnectError, match=r"does not speak TLS") as caught:
            await connecting
    assert isinstance(caught.value, AuthenticationError) is bool(answer)
    assert near.events == []
