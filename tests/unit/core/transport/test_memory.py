"""Transports in memory, their water marks, and two of them spliced to one."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from asyncrpc.core.transport.address import Address
from asyncrpc.core.transport.flow import LINGER_S, Gauge, WaterMarks
from asyncrpc.core.transport.memory import TURN_BYTES, MemoryHub
from asyncrpc.core.transport.splice import Splice
from asyncrpc.core.transport.tcp import TcpConnector
from asyncrpc.errors import (
    ConnectError,
    ConnectionLostError,
    TransportError,
    UsageError,
)
from asyncrpc.testing.conformance import Acceptor, Pair, Recorder
from asyncrpc.testing.loop import SimLoop

PS = Address("mem", "ps")


class Broken(Recorder):
    def buffer_updated(self, nbytes: int, /) -> None:
        raise ValueError("cannot read this")


async def connected(near: Recorder | None = None) -> Pair:
    hub, acceptor, near = MemoryHub(), Acceptor(), near or Recorder()
    listener = await hub.connector().listen(PS, acceptor)
    await hub.connector().connect(PS, near)
    await acceptor.connected(1)
    await listener.close()
    return Pair(near, acceptor.accepted[0])


class TestMemory:
    loops = {"sim": SimLoop}  # noqa: RUF012  (read once, by the conftest)

    async def test_hubs_are_independent(self) -> None:
        await MemoryHub().connector().listen(PS, Recorder)
        with pytest.raises(ConnectError, match="no such listener; there is: none"):
            await MemoryHub().connector().connect(PS, Recorder())

    async def test_name_is_taken_once(self) -> None:
        hub = MemoryHub()
        await hub.connector().listen(PS, Recorder)
        with pytest.raises(TransportError, match="mem://ps: the name is taken"):
            await hub.connector().listen(PS, Recorder)

    async def test_send_delivers_in_the_next_turn(self) -> None:
        pair = await connected()
        pair.near.transport.send([b"x"])
        assert not pair.far.received
        assert pair.near.transport.queued_bytes == 1
        await asyncio.sleep(0)
        assert pair.far.received == b"x"

    async def test_turn_delivers_a_bounded_number_of_bytes(self) -> None:
        pair = await connected()
        pair.near.transport.send([bytes(10 * TURN_BYTES)])
        await asyncio.sleep(0)
        assert len(pair.far.received) == TURN_BYTES
        await pair.far.until_received(10 * TURN_BYTES)

    async def test_failing_handler_loses_the_connection(self) -> None:
        unhandled: list[dict[str, object]] = []
        loop = asyncio.get_running_loop()
        pair = await connected(Broken())
        loop.set_exception_handler(lambda _loop, context: unhandled.append(context))
        pair.far.transport.send([b"x" * 10])
        await pair.near.until_lost()
        await pair.far.until_lost()
        assert isinstance(unhandled[0]["exception"], ValueError)
        assert isinstance(pair.near.error, ConnectionLostError)
        assert isinstance(pair.far.error, ConnectionLostError)

    async def test_peer_that_never_reads_is_left_after_the_linger(self) -> None:
        pair = await connected()
        pair.far.transport.pause_reading()
        pair.near.transport.send([b"unread"])
        pair.near.transport.close()
        await pair.near.until_lost()
        assert asyncio.get_running_loop().time() == pytest.approx(LINGER_S)
        assert "6 bytes unsent" in str(pair.near.error)
        await pair.far.until_lost()
        assert isinstance(pair.far.error, ConnectionLostError)

    async def test_close_without_unread_bytes_is_orderly_on_both_sides(self) -> None:
        pair = await connected()
        pair.far.transport.pause_reading()
        pair.near.transport.close()
        await pair.near.until_lost()
        assert pair.near.error is None
        assert not pair.far.lost
        pair.far.transport.resume_reading()
        await pair.far.until_lost()
        assert pair.far.error is None


def test_water_marks_must_be_in_order() -> None:
    with pytest.raises(UsageError, match="low 2 and high 1"):
        WaterMarks(high_bytes=1, low_bytes=2)


async def test_events_come_at_the_marks_only() -> None:
    handler = Recorder()
    gauge = Gauge(handler, WaterMarks(high_bytes=100, low_bytes=20))
    gauge.add(100)
    assert handler.events == []
    gauge.add(1)
    gauge.add(50)
    assert handler.events == ["pause_writing"]
    gauge.remove(130)
    assert handler.events == ["pause_writing"]
    gauge.remove(1)
    gauge.remove(20)
    assert handler.events == ["pause_writing", "resume_writing"]
    assert gauge.queued_bytes == 0
    assert asyncio.get_running_loop().is_running()


async def test_changed_water_marks_hold_from_then_on() -> None:
    handler = Recorder()
    gauge = Gauge(handler, WaterMarks(high_bytes=100, low_bytes=20))
    gauge.use(WaterMarks(high_bytes=0, low_bytes=0))
    gauge.add(2)
    gauge.remove(1)
    assert handler.events == ["pause_writing"]
    gauge.remove(1)
    assert handler.events == ["pause_writing", "resume_writing"]


async def test_cleared_gauge_is_silent() -> None:
    handler = Recorder()
    gauge = Gauge(handler, WaterMarks(high_bytes=1, low_bytes=0))
    gauge.add(2)
    gauge.clear()
    gauge.remove(0)
    assert handler.events == ["pause_writing"]
    assert gauge.queued_bytes == 0


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
