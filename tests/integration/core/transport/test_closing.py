"""What meets the end of a listener or a connection is done, or refused: not lost."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import tempfile
from pathlib import Path

import pytest

from asyncrpc.core.transport.abc import Connector
from asyncrpc.core.transport.address import Address
from asyncrpc.core.transport.tcp import TcpConnector
from asyncrpc.core.transport.uds import UdsConnector
from asyncrpc.testing.conformance import Recorder


def dialed(address: Address) -> socket.socket:
    """Connect without the loop: it has the connection in its next turn."""
    if address.scheme == "uds":
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(address.host)
        return sock
    return socket.create_connection((address.host, address.port))


# In the first turn of the loop the connection is there, in the second it is accepted.
@pytest.mark.parametrize("turns", range(5))
@pytest.mark.parametrize(
    "connector", [TcpConnector(), UdsConnector()], ids=["tcp", "uds"]
)
async def test_closed_listener_ends_its_dialers(
    connector: Connector, turns: int
) -> None:
    with tempfile.TemporaryDirectory(prefix="arpc-") as directory:
        where = Address("uds", str(Path(directory) / "worker.sock"))
        if connector.scheme == "tcp":
            where = Address("tcp", "127.0.0.1", 0)
        handlers: list[Recorder] = []

        def accept() -> Recorder:
            handlers.append(Recorder())
            return handlers[-1]

        listener = await connector.listen(where, accept)
        with dialed(listener.addresses[0]) as sock:
            for _ in range(turns):
                await asyncio.sleep(0)
            await listener.close()
            for _ in range(5):
                await asyncio.sleep(0)
            for handler in handlers:
                handler.transport.abort()
            sock.settimeout(5)
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.to_thread(sock.recv, 1) == b""


@pytest.mark.parametrize(
    "connector", [TcpConnector(), UdsConnector()], ids=["tcp", "uds"]
)
async def test_last_words_of_peer_survive_a_failed_write(connector: Connector) -> None:
    """A loop that is held up may write before it reads."""
    with tempfile.TemporaryDirectory(prefix="arpc-") as directory:
        if connector.scheme == "tcp":
            server = socket.create_server(("127.0.0.1", 0))
            where = Address("tcp", *server.getsockname())
        else:
            where = Address("uds", str(Path(directory) / "peer.sock"))
            server = socket.socket(socket.AF_UNIX)
            server.bind(where.host)
            server.listen()
        handler = Recorder()
        with server:
            transport = await connector.connect(where, handler)
            peer, _ = server.accept()
        # In one turn of the loop, as if it had been held up meanwhile.
        peer.sendall(b"goodbye")
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.close()
        for _ in range(2):
            transport.send((b"are you there?",))
        await handler.until(lambda me: me.lost == 1)
        assert bytes(handler.received) == b"goodbye"
