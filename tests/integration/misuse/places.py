"""Where a public function may be used wrongly: on another loop, too early, too late."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import asyncrpc
from asyncrpc import LocalRendezvous, Worker
from asyncrpc.testing import acting_as
from tests.integration.misuse.using import NOTHING_RAISED, Outcome, Use, outcome_of
from tests.integration.misuse.wrong import World

Place = Callable[[Use, World], Awaitable[Outcome]]
_FORKED_TEXT_MAX: Final = 4000


async def on_another_loop(use: Use, world: World) -> Outcome:
    """Use it in a thread that runs an event loop of its own."""
    with acting_as(world.a):
        call, context = use.prepared(world), contextvars.copy_context()
    attempt = outcome_of(lambda: use.finished(call()))
    return await asyncio.to_thread(context.run, asyncio.run, attempt)


async def in_another_thread(use: Use, world: World) -> Outcome:
    """Use it in a thread without a loop; what it returns is awaited on the worker's."""
    with acting_as(world.a):
        call, context = use.right_call(world), contextvars.copy_context()

        async def attempt() -> Any:
            return await use.finished(await asyncio.to_thread(context.run, call))

        return await outcome_of(attempt)


async def before_the_start(use: Use, world: World) -> Outcome:
    """Use a worker that has not been started."""
    new = Worker("new", rendezvous=LocalRendezvous(1))
    return await use.outcome(replace(world, a=new))


async def while_it_closes(use: Use, world: World) -> Outcome:
    """Use a worker that drains: a call is in flight there."""
    with acting_as(world.a):
        call = use.right_call(world)
    held = asyncio.ensure_future(world.other.peer("a").call(hold))
    await world.other.peer("a").call(len, "ab")  # so the other has arrived
    closing = asyncio.ensure_future(world.a.shutdown())
    await asyncio.sleep(0)
    assert world.a.is_draining
    try:
        with acting_as(world.a):
            return await outcome_of(lambda: use.finished(call()))
    finally:
        with acting_as(world.a):
            let_go()
        await held
        await closing


async def after_the_end(use: Use, world: World) -> Outcome:
    """Use a worker that has ended."""
    with acting_as(world.a):
        call = use.prepared(world)
    await world.a.shutdown()
    with acting_as(world.a):
        return await outcome_of(lambda: use.finished(call()))


async def in_a_forked_child(use: Use, world: World) -> Outcome:
    """Use a worker of the parent: as far as it goes without waiting."""
    with acting_as(world.a):
        call = use.prepared(world)
        reader, writer = os.pipe()
        pid = os.fork()
        if not pid:
            _report(call, writer)
    os.close(writer)
    with os.fdopen(reader) as told:
        kind, _, text = told.read().partition(": ")
    os.waitpid(pid, 0)  # noqa: ASYNC222  (it has told all, and ends)
    return (
        Outcome(getattr(asyncrpc.errors, kind, RuntimeError), text)
        if kind
        else NOTHING_RAISED
    )


def _report(call: Callable[[], Any], writer: int) -> None:
    """Make an attempt in a forked child, tell the parent what it raised, and end."""
    told = ""
    try:
        result = call()
        if inspect.isawaitable(result):
            result.__await__().__next__()
        elif hasattr(result, "__anext__"):
            result.__anext__().__await__().__next__()
        elif hasattr(result, "__aenter__"):
            result.__aenter__().__await__().__next__()
    except StopIteration:
        pass
    except BaseException as error:  # noqa: BLE001  (told to the parent)
        told = f"{type(error).__name__}: {error}"
    finally:
        os.write(writer, told.encode()[:_FORKED_TEXT_MAX])
        os._exit(0)


PLACES: Final[Mapping[str, Place]] = {
    "on another loop": on_another_loop,
    "in another thread": in_another_thread,
    "before the start": before_the_start,
    "while it closes": while_it_closes,
    "after the end": after_the_end,
    "in a forked child": in_a_forked_child,
}

_holding: dict[str, asyncio.Event] = {}


async def hold() -> None:
    """Run until the test lets it end."""
    held = _holding[asyncrpc.current_worker().name] = asyncio.Event()
    await held.wait()


def let_go() -> None:
    for held in _holding.values():
        held.set()
    _holding.clear()
