"""What the workers of a simulation do, each a coroutine of one worker."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final, TypeAlias

import asyncrpc
from asyncrpc import AsyncRpcError
from tests.simulation import participant
from tests.simulation.participant import Participant, Value
from tests.simulation.world import World

Action: TypeAlias = Callable[[World, Participant], Coroutine[Any, Any, None]]


def near(world: World, me: Participant) -> str:
    """Choose one of those whom a worker calls."""
    return world.rng.choice(world.neighbours[me.name])


async def call(world: World, me: Participant) -> None:
    function = world.rng.choice([participant.run, participant.run_plain])
    await world.call(me, near(world, me), function)


async def call_on(world: World, me: Participant) -> None:
    to = near(world, me)
    further = world.rng.choice(world.neighbours[to])
    await world.call(me, to, participant.relay, further)


async def call_in_time(world: World, me: Participant) -> None:
    """Call with a deadline that may be too short."""
    allowed_s = world.rng.uniform(0.0005, 0.5)
    takes_s = world.rng.uniform(0.0, 0.5)
    async with asyncrpc.deadline(allowed_s):
        await world.call(me, near(world, me), participant.run_slowly, takes_s)


async def give_up(world: World, me: Participant) -> None:
    """Call, and cancel it after a while."""
    number = world.ledger.new(f"{me.name} calls and gives up")
    seconds = world.rng.uniform(0.0, 1.0)
    to = near(world, me)
    task = asyncio.create_task(
        me.peer(to).call(participant.run_slowly, number, seconds)
    )
    world.ledger.excuse(number)
    try:
        await asyncio.wait([task], timeout=world.rng.uniform(0.0, 1.0))
    finally:
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError, AsyncRpcError):
        await task


async def stream(world: World, me: Participant) -> None:
    """Read a generator, to its end or not: items come in order, without a gap."""
    number = world.ledger.new(f"{me.name} reads a stream")
    world.ledger.excuse(number)
    length, wanted = world.rng.randrange(40), world.rng.randrange(40)
    seen = 0
    with contextlib.suppress(AsyncRpcError):
        items = me.peer(near(world, me)).stream(participant.count_to, number, length)
        async with contextlib.aclosing(items):
            async for item in items:
                if item != seen:
                    world.problems.append(f"{me.name}: item {item} in place of {seen}")
                seen += 1
                if seen == wanted:
                    break
            else:
                if seen != length:
                    world.problems.append(f"{me.name}: {seen} items of {length}")


async def make(world: World, me: Participant) -> None:
    """Have a value made by a neighbour, and keep the reference."""
    to, number = near(world, me), world.values.new()
    call_number = world.ledger.new(f"{me.name} makes value {number} on {to}")
    world.ledger.excuse(call_number)  # remote() tells nobody how it ended
    me.kept[number] = me.peer(to).remote(Value, call_number, number)


async def share(world: World, me: Participant) -> None:
    """Pass a reference on to a neighbour, who keeps it."""
    if not me.kept:
        return
    number = world.rng.choice(sorted(me.kept))
    function = world.rng.choice([participant.keep, participant.borrow])
    await world.call(me, near(world, me), function, me.kept[number], number)


async def use(world: World, me: Participant) -> None:
    if me.kept:
        number = world.rng.choice(sorted(me.kept))
        await world.use(me, me.kept[number], number)


async def drop(world: World, me: Participant) -> None:
    if me.kept:
        number = world.rng.choice(sorted(me.kept))
        del me.kept[number]


CALLS: Final[Mapping[Action, int]] = {call: 6, call_on: 3, call_in_time: 3, give_up: 2}
STREAMS: Final[Mapping[Action, int]] = {stream: 6, call: 1}
REFERENCES: Final[Mapping[Action, int]] = {make: 3, share: 4, use: 4, drop: 3, call: 1}
ALL: Final[Mapping[Action, int]] = {**CALLS, **STREAMS, **REFERENCES, call: 6}
