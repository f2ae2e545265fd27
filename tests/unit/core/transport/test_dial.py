"""Dialling several addresses: the first that answers wins, no loser is left open."""

from __future__ import annotations

import asyncio

import pytest

from asyncrpc.core.transport.address import Address
from asyncrpc.core.transport.dial import Dialled, connect_any
from asyncrpc.core.transport.race import STAGGER_S
from asyncrpc.errors import ConnectError, UsageError
from asyncrpc.testing.conformance import Acceptor, Recorder
from asyncrpc.testing.loop import SimLoop
from asyncrpc.testing.network import Network

PS = tuple(Address("mem", f"ps-{index}") for index in range(3))


class World:
    """Three hosts that listen, each with one address of the peer."""

    def __init__(self) -> None:
        self.network = Network(seed=1)
        self.connectors = {"mem": self.network.connector("a")}
        self.acceptors = [Acceptor() for _ in PS]
        self.handlers: list[Recorder] = []

    async def listen(self, *indices: int) -> None:
        for index in indices:
            self.network.between("a", f"host-{index}").delay(0.0)
            connector = self.network.connector(f"host-{index}")
            await connector.listen(PS[index], self.acceptors[index])

    def handler(self) -> Recorder:
        self.handlers.append(Recorder())
        return self.handlers[-1]

    async def dial(self) -> Dialled[Recorder]:
        return await connect_any(PS, self.handler, self.connectors)

    def cut(self, index: int) -> None:
        self.network.between("a", f"host-{index}").partition()


class TestDialling:
    loops = {"sim": SimLoop}  # noqa: RUF012  (read once, by the conftest)

    async def test_first_address_is_preferred(self) -> None:
        world = World()
        await world.listen(0, 1, 2)
        dialled = await world.dial()
        assert dialled.address == PS[0]
        assert dialled.handler is world.handlers[0]
        assert dialled.transport is dialled.handler.transport
        assert len(world.handlers) == 1
        assert asyncio.get_running_loop().time() == 0

    async def test_failed_address_starts_the_next_at_once(self) -> None:
        world = World()
        await world.listen(2)
        dialled = await world.dial()
        assert dialled.address == PS[2]
        assert asyncio.get_running_loop().time() < STAGGER_S

    async def test_silent_address_starts_the_next_after_the_stagger(self) -> None:
        world = World()
        await world.listen(0, 1, 2)
        world.cut(0)
        dialled = await world.dial()
        assert dialled.address == PS[1]
        assert asyncio.get_running_loop().time() == pytest.approx(STAGGER_S)

    async def test_each_silent_address_costs_one_stagger(self) -> None:
        world = World()
        await world.listen(0, 1, 2)
        world.cut(0)
        world.cut(1)
        dialled = await world.dial()
        assert dialled.address == PS[2]
        assert asyncio.get_running_loop().time() == pytest.approx(2 * STAGGER_S)

    async def test_losing_connections_are_closed(self) -> None:
        world = World()
        await world.listen(0, 1)
        for index in (0, 1):  # both answer at about the same time
            world.network.between("a", f"host-{index}").clog(1.0)
        dialled = await world.dial()
        await asyncio.sleep(60)
        begun = [handler for handler in world.handlers if handler.events]
        still_open = [handler for handler in begun if not handler.lost]
        assert still_open == [dialled.handler]

    async def test_failed_addresses_are_listed_with_their_reasons(self) -> None:
        world = World()
        with pytest.raises(ConnectError) as caught:
            await world.dial()
        for address in PS:
            assert f"{address}: cannot connect" in str(caught.value)
        assert isinstance(caught.value.__cause__, ConnectError)

    async def test_address_of_an_unknown_scheme_is_skipped(self) -> None:
        world = World()
        await world.listen(0)
        addresses = (Address("tcp", "127.0.0.1", 1), PS[0])
        dialled = await connect_any(addresses, world.handler, world.connectors)
        assert dialled.address == PS[0]
        with pytest.raises(
            ConnectError, match="no connector for this scheme; there are: mem"
        ):
            await connect_any(addresses[:1], world.handler, world.connectors)

    async def test_empty_list_of_addresses_is_an_error(self) -> None:
        with pytest.raises(ConnectError, match="none of its addresses can be used"):
            await connect_any((), Recorder, {})

    async def test_cancellation_ends_every_attempt(self) -> None:
        world = World()
        await world.listen(0, 1, 2)
        for index in range(3):
            world.cut(index)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(10):
                await world.dial()
        for index in range(3):
            world.network.between("a", f"host-{index}").heal()
        await asyncio.sleep(60)
        assert [handler.events for handler in world.handlers] == [[], [], []]

    async def test_bug_in_the_factory_is_not_hidden(self) -> None:
        def broken() -> Recorder:
            raise UsageError("no handler today")

        world = World()
        with pytest.raises(UsageError, match="no handler today"):
            await connect_any(PS, broken, world.connectors)
