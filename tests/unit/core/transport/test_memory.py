"""Memory: names, turns of the loop, and handlers that fail."""

from __future__ import annotations

import asyncio

import pytest

from asyncrpc.core.transport.address import Address
from asyncrpc.core.transport.flow import LINGER_S
from asyncrpc.core.transport.memory import TURN_BYTES, MemoryHub
from asyncrpc.errors import ConnectError, ConnectionLostError, TransportError
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
