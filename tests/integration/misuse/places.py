"""Where a public function may be used wrongly: on another loop, too early, too late.

A place is tried with several uses in one world, each of them twice.  None of them needs
the others: what one kept to itself would show in the next.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import asyncrpc
from asyncrpc import LocalRendezvous, Worker
from asyncrpc.testing import acting_as
from tests.integration.misuse.forked import in_a_forked_child
from tests.integration.misuse.using import Call, Outcome, Use, outcome_of
from tests.integration.misuse.wrong import World

TRIES: Final = 2
DRAIN_S: Final = 600.0  # more than all attempts take together

logger = logging.getLogger(__name__)

Uses = Mapping[str, Use]
Outcomes = Mapping[str, Sequence[Outcome]]


async def on_another_loop(uses: Uses, world: World) -> Outcomes:
    """Use each in a thread that runs an event loop of its own."""

    async def attempt(use: Use) -> Outcome:
        with acting_as(world.a):
            call, context = await use.made_ready(world), contextvars.copy_context()
        tried = outcome_of(lambda: use.finished(call()))
        return await asyncio.to_thread(context.run, asyncio.run, tried)

    return await _each(uses, attempt)


async def in_another_thread(uses: Uses, world: World) -> Outcomes:
    """Use each in a thread without a loop; what it returns is awaited on the worker's.

    But for a coroutine that would wait for others there.
    """

    async def attempt(use: Use) -> Outcome:
        with acting_as(world.a):
            call, context = await use.made_ready(world), contextvars.copy_context()

            async def tried() -> Any:
                result = await asyncio.to_thread(context.run, call)
                if use.rightly is None or not inspect.iscoroutine(result):
                    return await use.finished(result)
                return result.close()

            return await outcome_of(tried)

    return await _each(uses, attempt)


async def before_the_start(uses: Uses, world: World) -> Outcomes:
    """Use a worker that has not been started."""

    async def attempt(use: Use) -> Outcome:
        new = replace(world, a=Worker("new", rendezvous=LocalRendezvous(1)), kept={})

        async def tried() -> Any:
            return await use.finished((await use.made_ready(new))())

        with acting_as(new.a):
            return await outcome_of(tried)

    return await _each(uses, attempt)


async def while_it_closes(uses: Uses, world: World) -> Outcomes:
    """Use a worker that drains: a call is in flight there."""
    with acting_as(world.a):
        calls = await _made_ready(uses, world, Use.right_call)
    held = asyncio.ensure_future(world.other.peer("a").call(hold))
    await world.other.peer("a").call(len, "ab")  # so the other has arrived
    closing = asyncio.ensure_future(world.a.shutdown(drain_timeout_s=DRAIN_S))
    await asyncio.sleep(0)
    assert world.a.is_draining
    try:
        outcomes = await _tried(uses, world, calls)
        assert not closing.done(), "it has ended meanwhile"
        return outcomes
    finally:
        with acting_as(world.a):
            let_go()
        await held
        await closing


async def after_the_end(uses: Uses, world: World) -> Outcomes:
    """Use a worker that has ended."""
    with acting_as(world.a):
        calls = await _made_ready(uses, world, Use.prepared)
    await world.a.shutdown()
    return await _tried(uses, world, calls)


async def forked(uses: Uses, world: World) -> Outcomes:
    """Use a worker of the parent."""
    with acting_as(world.a):
        calls = await _made_ready(uses, world, Use.prepared, 2 * TRIES)
        return await in_a_forked_child(uses, calls, world.a)


async def _each(
    uses: Uses, attempt: Callable[[Use], Awaitable[Outcome]]
) -> dict[str, list[Outcome]]:
    outcomes: dict[str, list[Outcome]] = {}
    for name, use in uses.items():
        logger.warning("%s", name)  # the last of them is in hand when the traffic ends
        outcomes[name] = [await attempt(use) for _ in range(TRIES)]
    return outcomes


async def _made_ready(
    uses: Uses, world: World, how: Callable[[Use, World], Call], times: int = TRIES
) -> dict[str, list[Call]]:
    """Return calls of each use, as many as are tried."""
    calls = {}
    for name, use in uses.items():
        if use.ready is not None:
            await use.ready(world)
        calls[name] = [how(use, world) for _ in range(times)]
    return calls


async def _tried(
    uses: Uses, world: World, calls: Mapping[str, Sequence[Call]]
) -> Outcomes:
    """Make calls that were prepared."""

    async def attempt(use: Use, call: Call) -> Outcome:
        with acting_as(world.a):
            return await outcome_of(lambda: use.finished(call()))

    outcomes: dict[str, list[Outcome]] = {}
    for name, use in uses.items():
        logger.warning("%s", name)
        outcomes[name] = [await attempt(use, call) for call in calls[name]]
    return outcomes


Place = Callable[[Uses, World], Awaitable[Outcomes]]
PLACES: Final[Mapping[str, Place]] = {
    "on another loop": on_another_loop,
    "in another thread": in_another_thread,
    "before the start": before_the_start,
    "while it closes": while_it_closes,
    "after the end": after_the_end,
    "in a forked child": forked,
}
WITHOUT_WORKER: Final = {"before the start", "after the end", "in a forked child"}
ENDS: Final = {"while it closes", "after the end"}

_holding: dict[str, asyncio.Event] = {}


async def hold() -> None:
    """Run until the test lets it end."""
    held = _holding[asyncrpc.current_worker().name] = asyncio.Event()
    await held.wait()


def let_go() -> None:
    for held in _holding.values():
        held.set()
    _holding.clear()
