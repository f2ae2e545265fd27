"""Ray's object store, used wrongly: it says so, and a cluster goes on."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import pytest
import ray
import torch

import asyncrpc.ray
from asyncrpc.errors import UsageError
from tests.clusters.ray.scenarios import ONE, Scenarios, on
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
from tests.integration.misuse.using import ANYTHING, NOTHING_RAISED, Outcome, Use
from tests.integration.misuse.wrong import OF_WORKERS, World

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


async def _store(world: World) -> None:
    world.kept["stored"] = await asyncrpc.ray.put(torch.ones(3))


USES: Final[Mapping[str, Use]] = {
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
async def worlds() -> AsyncIterator[World]:
    """A cluster whose worker is called meanwhile, and who else is there."""
    async with others() as about, on([ONE]) as cluster:
        stranger, ended, loop, unawaited = about
        pid = await cluster["w0"].call(os.getpid)

        async def flow() -> None:
            while True:
                assert await cluster["w0"].call(os.getpid) == pid

        flowing = asyncio.create_task(flow())
        try:
            kept: dict[str, Any] = {}
            yield World(cluster.worker, None, stranger, ended, loop, unawaited, kept)
            assert await cluster["w0"].call(os.getpid) == pid
            assert not flowing.done(), flowing
        finally:
            flowing.cancel()
            await asyncio.wait([flowing])


def check(place: str, outcomes: Mapping[str, Sequence[Outcome]]) -> None:
    """Assert that each worked or said what is wrong, both times."""
    problems = [
        f"{name}: {problem}"
        for name, use in USES.items()
        if (problem := problem_of(use, place, outcomes[name]))
    ]
    assert not problems, "\n".join([place, *problems])


@scenario
async def mistake_costs_its_own_call_only(_: Nodes) -> None:
    assert set(USES) == ON_RAY
    async with worlds() as world:
        for name, use in USES.items():
            assert await use.outcome(world) == NOTHING_RAISED, name
            first = await mistakes(use, name, world)
            problems = [
                (parameter, kind, problem)
                for (parameter, kind), outcome in first.items()
                if (problem := outcome.problem(use, parameter))
            ]
            assert not problems, f"{name}\n{listed(problems)}"
            again = await mistakes(use, name, world)
            assert {at: mistake.words for at, mistake in again.items()} == {
                at: mistake.words for at, mistake in first.items()
            }
            assert await use.outcome(world) == NOTHING_RAISED, name


@scenario
async def elsewhere_it_works_or_says_so(_: Nodes) -> None:
    async with worlds() as world:
        check("on another loop", await on_another_loop(USES, world))
        check("in another thread", await in_another_thread(USES, world))
        check("in a forked child", await forked(USES, world))


@scenario
async def without_ray_it_says_so(nodes: Nodes) -> None:
    stored = await asyncrpc.ray.put(torch.ones(3))
    ray.shutdown()
    try:
        for _try in range(TRIES):
            for attempt in (
                on([ONE]).__aenter__(),
                asyncrpc.ray.put(torch.ones(3)),
                asyncrpc.ray.get(stored),
            ):
                with pytest.raises(UsageError, match=r"ray\.init"):
                    await attempt
    finally:
        nodes.connect()
