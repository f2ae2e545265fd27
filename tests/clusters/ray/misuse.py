"""What needs a Ray cluster, used wrongly: it says so, and the gang goes on.

The rest of `asyncrpc.ray` is with everything else, in tests/integration/misuse.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Final

import pytest
import ray
import torch

import asyncrpc.ray
from asyncrpc.errors import AlreadyStartedError, UsageError
from asyncrpc.ray import Gang, GangChange, GangChangeKind, GangChanges
from tests.clusters.ray import functions
from tests.clusters.ray.scenarios import ONE, Scenarios, placement_groups
from tests.clusters.ray.session import Nodes
from tests.integration.misuse.conftest import others
from tests.integration.misuse.left_out_hosts import ON_RAY
from tests.integration.misuse.places import (
    TRIES,
    forked,
    in_another_thread,
    on_another_loop,
)
from tests.integration.misuse.test_matrix import listed, mistakes
from tests.integration.misuse.test_places import problem_of
from tests.integration.misuse.uses_values import FLAG
from tests.integration.misuse.using import (
    ANYTHING,
    NOTHING_RAISED,
    Outcome,
    Use,
    nothing,
)
from tests.integration.misuse.wrong import OF_WORKERS, SECONDS, World

MISUSES: Final = Scenarios()
scenario: Final = MISUSES.add

CANNOT_BE_STORED: Final = {
    "too deep",
    "unpicklable",
    "a meta tensor",
    "a generator",
    "raises in __reduce__",
    "raises in everything",
    *OF_WORKERS,
}
DRAIN_S: Final = 600.0  # more than all attempts take together


def _gang(world: World) -> Gang:
    gang: Gang = world.kept["gang"]
    return gang


def _changes(world: World) -> GangChanges:
    changes = _gang(world).changes()
    changes.put(GangChange(GangChangeKind.RUNNING, 1, (0,)))
    return changes


async def _call(peer: asyncrpc.Peer) -> int:
    return await peer.call(functions.pid)


async def _store(world: World) -> None:
    world.kept["stored"] = await asyncrpc.ray.put(torch.ones(3))


async def _leave(entered: Awaitable[Gang]) -> None:
    gang = await entered
    await gang.__aexit__(None, None, None)


USES: Final[Mapping[str, Use]] = {
    "ray.Gang.__aenter__": Use(
        lambda _: Gang([ONE]).__aenter__, finish=_leave, needs_worker=False
    ),
    "ray.Gang.changed": Use(
        lambda world: _gang(world).changed,
        right={"since": lambda _: 0},
        # None waits for the next generation.
        fits={"since": {"none"}, "timeout_s": SECONDS | {"infinite"}},
    ),
    "ray.Gang.changes": Use(
        lambda world: _gang(world).changes, finish=nothing, needs_worker=False
    ),
    "ray.Gang.peer": Use(
        lambda world: _gang(world).peer, right={"rank": lambda _: 0}, finish=_call
    ),
    "ray.GangChanges.__anext__": Use(
        lambda world: _changes(world).__anext__, needs_worker=False
    ),
    "ray.get": Use(
        lambda _: asyncrpc.ray.get,
        ready=_store,
        right={"stored": lambda world: world.kept["stored"]},
        fits={"copy": FLAG},
        needs_worker=False,
    ),
    "ray.put": Use(
        lambda _: asyncrpc.ray.put,
        right={"value": lambda _: {"weights": torch.ones(3)}},
        fits={"value": ANYTHING - CANNOT_BE_STORED},
        needs_worker=False,
    ),
}


@asynccontextmanager
async def worlds(**options: Any) -> AsyncIterator[World]:
    """A gang, and who else is there."""
    async with others() as about, Gang([ONE], name="g", **options) as gang:
        stranger, ended, loop, unawaited = about
        kept = {"gang": gang}
        yield World(gang.worker, None, stranger, ended, loop, unawaited, kept)


@asynccontextmanager
async def traffic(gang: Gang) -> AsyncIterator[None]:
    """Call the worker of the gang again and again meanwhile."""
    pid = gang.workers[0].pid

    async def flow() -> None:
        while True:
            assert await gang.peer(0).call(functions.pid) == pid

    flowing = asyncio.create_task(flow())
    try:
        yield
        await gang.peer(0).call(functions.pid)
        assert not flowing.done(), flowing
    finally:
        flowing.cancel()
        await asyncio.wait([flowing])


async def tried(world: World) -> dict[str, list[Outcome]]:
    """Use each rightly, twice."""
    return {
        name: [await use.outcome(world) for _ in range(TRIES)]
        for name, use in USES.items()
    }


def check(place: str, outcomes: Mapping[str, Sequence[Outcome]]) -> None:
    """Assert that each worked or said what is wrong, both times."""
    problems = [
        f"{name}: {problem}"
        for name, use in USES.items()
        if (problem := problem_of(use, place, outcomes[name]))
    ]
    assert not problems, "\n".join([place, *problems])


@scenario
async def a_mistake_costs_its_own_call_only(_: Nodes) -> None:
    assert set(USES) == ON_RAY
    async with worlds() as world:
        before = _gang(world).workers
        for name, use in USES.items():
            assert await use.outcome(world) == NOTHING_RAISED, name
            first = await mistakes(use, name, world)
            problems = [
                (parameter, kind, problem)
                for (parameter, kind), outcome in first.items()
                if (problem := outcome.problem(use, parameter))
            ]
            assert not problems, f"{name}\n{listed(problems)}"
            async with traffic(_gang(world)):
                again = await mistakes(use, name, world)
            assert {at: mistake.words for at, mistake in again.items()} == {
                at: mistake.words for at, mistake in first.items()
            }
            assert await use.outcome(world) == NOTHING_RAISED, name
        assert _gang(world).workers == before


@scenario
async def on_another_loop_it_works_or_says_so(_: Nodes) -> None:
    async with worlds() as world, traffic(_gang(world)):
        check("on another loop", await on_another_loop(USES, world))
        check("in another thread", await in_another_thread(USES, world))


@scenario
async def in_a_forked_child_it_says_so(_: Nodes) -> None:
    async with worlds() as world, traffic(_gang(world)):
        check("in a forked child", await forked(USES, world))


@scenario
async def before_the_block_and_after_it_there_is_no_gang(_: Nodes) -> None:
    async with worlds() as world:
        new = replace(world, kept={"gang": Gang([ONE])})
        async with traffic(_gang(world)):
            check("before the start", await tried(new))
    check("after the end", await tried(world))


@scenario
async def while_a_gang_ends_it_says_so(_: Nodes) -> None:
    """Its worker drains meanwhile: a call is in flight there."""
    async with worlds(drain_timeout_s=DRAIN_S) as world:
        gang = _gang(world)
        (actor,) = gang.actors
        held = asyncio.ensure_future(gang.peer(0).call(functions.until_told))
        await gang.peer(0).call(functions.pid)  # so the other has arrived
        ending = asyncio.ensure_future(gang.__aexit__(None, None, None))
        while gang.workers:  # noqa: ASYNC110  (nothing tells that it has begun)
            await asyncio.sleep(0)
        check("while it ends", await tried(world))
        assert not ending.done(), "it has ended meanwhile"
        await actor.run.remote(functions.tell)  # by Ray: the worker takes no calls
        await held
        await ending


@scenario
async def a_gang_is_entered_once(_: Nodes) -> None:
    async with worlds() as world:
        for _try in range(TRIES):
            with pytest.raises(AlreadyStartedError, match="entered before"):
                await _gang(world).__aenter__()
        assert await _gang(world).peer(0).call(functions.pid)
    with pytest.raises(AlreadyStartedError, match="entered before"):
        await _gang(world).__aenter__()
    await _gang(world).__aexit__(None, None, None)  # again: nothing is left to end
    never = Gang([ONE])
    await never.__aexit__(None, None, None)
    assert await placement_groups() == []


@scenario
async def a_second_gang_of_the_same_name_is_refused(_: Nodes) -> None:
    async with worlds() as world:
        for _try in range(TRIES):
            with pytest.raises(UsageError, match=r"no other gang .* not 'g'"):
                await Gang([ONE], name="g").__aenter__()
        assert await _gang(world).peer(0).call(functions.pid)
    assert await placement_groups() == []


@scenario
async def without_ray_it_says_so(nodes: Nodes) -> None:
    stored = await asyncrpc.ray.put(torch.ones(3))
    ray.shutdown()
    try:
        for _try in range(TRIES):
            for attempt in (
                Gang([ONE]).__aenter__(),
                asyncrpc.ray.put(torch.ones(3)),
                asyncrpc.ray.get(stored),
            ):
                with pytest.raises(UsageError, match=r"ray\.init"):
                    await attempt
    finally:
        nodes.connect()
