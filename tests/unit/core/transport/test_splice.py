"""Two connections that are spliced are one."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from asyncrpc.core.transport.address import Address
from asyncrpc.core.transport.splice import Splice
from asyncrpc.core.transport.tcp import TcpConnector
from asyncrpc.testing.conformance import Acceptor, Recorder


async def until_ended(ended: list[Splice]) -> None:
    async with asyncio.timeout(30.0):
        while not ended:  # noqa: ASYNC110  (the callback sets no event)
            await asyncio.sleep(0.005)


async def test_spliced_bytes_pass_both_ways_until_one_end_closes() -> None:
    """More than any buffer holds, to an echo behind two connections."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    target = Address("tcp", *server.sockets[0].getsockname())
    connector = TcpConnector()
    ended: list[Splice] = []
    acceptor = Acceptor()
    listener = await connector.listen(Address("tcp", "127.0.0.1"), acceptor)
    where = listener.addresses[0]
    reader, writer = await asyncio.open_connection(where.host, where.port)
    await acceptor.connected(1)
    transport = acceptor.accepted[0].transport
    other = await connector.connect(target, Recorder())
    assert transport is not None
    Splice(transport, other, ended.append)
    data = bytes(range(256)) * 16384  # 4 MiB

    async def send() -> None:
        writer.write(data)
        await writer.drain()

    async with asyncio.timeout(60.0), asyncio.TaskGroup() as tasks:
        tasks.create_task(send())
        assert await reader.readexactly(len(data)) == data
    writer.close()
    await until_ended(ended)
    assert len(ended) == 1
    server.close()
    await listener.close()
