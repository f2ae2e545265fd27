"""Workers of a simulation, and the functions that they call on each other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, cast

import asyncrpc
from asyncrpc import RRef, Worker
from asyncrpc.testing.cluster import take_choices_from

if TYPE_CHECKING:
    from tests.simulation.world import World


class Participant(Worker):
    """A worker that knows the world it is in.

    Attributes:
        world: which enters what runs here.
        kept: references to values of others, by the values' numbers.
    """

    def __init__(self, world: World, name: str, **options: Any) -> None:
        super().__init__(name, network=world.network.connector(name), **options)
        take_choices_from(world.network, self.parts)
        self.world = world
        self.kept: dict[int, RRef[Value]] = {}

    def enter(self, call: int) -> None:
        """Enter that a call runs here."""
        self.world.ledger.begin(call, f"{self.name}/{self.incarnation:016x}")


def here() -> Participant:
    return cast("Participant", asyncrpc.current_worker())


async def run(call: int) -> int:
    here().enter(call)
    return call


def run_plain(call: int) -> int:
    here().enter(call)
    return call


async def run_slowly(call: int, seconds: float) -> int:
    here().enter(call)
    await asyncio.sleep(seconds)
    return call


async def relay(call: int, to: str) -> int:
    """Call on; what becomes of that is entered here, and is no error of this call."""
    me = here()
    me.enter(call)
    await me.world.call(me, to, run)
    return call


async def count_to(call: int, end: int) -> AsyncIterator[int]:
    here().enter(call)
    for number in range(end):
        yield number


class Value:
    """What references refer to."""

    def __init__(self, call: int, number: int) -> None:
        me = here()
        me.enter(call)
        me.world.values.add(number, self, me)
        self.number = number

    def get(self, call: int) -> int:
        here().enter(call)
        return self.number


async def keep(call: int, rref: RRef[Value], number: int) -> int:
    me = here()
    me.enter(call)
    me.kept[number] = rref
    return call


async def borrow(call: int, rref: RRef[Value], number: int) -> int:
    """Use a reference while the call lasts, and keep nothing."""
    me = here()
    me.enter(call)
    await me.world.use(me, rref, number)
    return call
