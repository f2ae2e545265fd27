"""The functions of actors on the worker that holds them.

Each but `make` is called there with a reference to the actor, which is local there.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import functools
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final

from asyncrpc import Policy, RRef, current_worker
from asyncrpc.clusters.actors.exclusive import actor_of, turn_of, with_turns
from asyncrpc.errors import Outcome, RejectedError
from asyncrpc.extend import host_of

_EXPOSED: Final = "__asyncrpc_exposed__"  # what `asyncrpc.expose` sets


def make(cls: type, args: Sequence[Any], kwargs: Mapping[str, Any]) -> RRef[Any]:
    """Make an actor; return a reference to it."""
    _check(cls)
    return RRef(with_turns(cls(*args, **kwargs)))


async def items_of(
    rref: RRef[Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> AsyncIterator[Any]:
    """Yield the items of an asynchronous generator method."""
    source = _method(await rref, name)(*args, **kwargs)
    async with aclosing(source):
        async for item in source:
            yield item


def steps_of(
    rref: RRef[Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[Any]:
    """Yield the items of a plain generator method."""
    yield from _method(rref.local_value(), name)(*args, **kwargs)


async def save(rref: RRef[Any]) -> Any:
    """Return a copy of the state of an actor, as pickle takes it."""
    value = await rref
    actor = actor_of(value)
    _check(type(actor))
    async with turn_of(value):
        return await _in_thread(lambda: copy.deepcopy(actor.__getstate__()))


async def load(rref: RRef[Any], state: Any) -> None:
    """Give an actor a state, as pickle does."""
    value = await rref
    actor = actor_of(value)
    _check(type(actor))
    async with turn_of(value):
        await _in_thread(functools.partial(_set_state, actor, state))


def _set_state(actor: Any, state: Any) -> None:
    # Source: pickle's `load_build`.
    if hasattr(actor, "__setstate__"):
        actor.__setstate__(state)
        return
    slots: Mapping[str, Any] = {}
    if isinstance(state, tuple):
        state, slots = state
    if state:
        actor.__dict__.update(state)
    for name, value in slots.items():
        setattr(actor, name, value)


def _method(value: Any, name: str) -> Callable[..., Any]:
    _check(type(actor_of(value)))
    if name.startswith("_"):
        raise RejectedError(f"{name!r} is private", outcome=Outcome.NOT_EXECUTED)
    method: Callable[..., Any] = getattr(value, name)
    return method


def _check(cls: type) -> None:
    """Refuse a class that peers may not use here."""
    policy = host_of(current_worker()).options.policy
    if policy is Policy.STRICT and _EXPOSED not in vars(cls):
        raise RejectedError(
            f"{cls.__qualname__} is not exposed here; mark it with @asyncrpc.expose",
            outcome=Outcome.NOT_EXECUTED,
        )


async def _in_thread(job: Callable[[], Any]) -> Any:
    """Run a job in a thread; a cancelled call sees its end, as it has the turn."""
    context = contextvars.copy_context()
    running = host_of(current_worker()).pool.run(lambda: context.run(job))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise
