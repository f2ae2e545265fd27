"""Every public function, given every wrong kind of each argument.

Each mistake ends in an error that names the argument, and nothing is sent where that
can be known here; made again amid other traffic, it fails the same way, and the traffic
goes on.  What the workers keep is afterwards as it was.
"""

from __future__ import annotations

import asyncio
import gc
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Final

import pytest

from asyncrpc import Worker
from asyncrpc.testing import Cluster, acting_as
from tests.integration.misuse import uses_calls, uses_ddp, uses_hosts, uses_training
from tests.integration.misuse.left_out import LEFT_OUT
from tests.integration.misuse.surface import surface
from tests.integration.misuse.traffic import Traffic
from tests.integration.misuse.using import Outcome, Use, outcome_of
from tests.integration.misuse.wrong import WRONG, World
from tests.soak.readings import tables

USES: Final[Mapping[str, Use]] = {
    **uses_calls.USES,
    **uses_training.USES,
    **uses_ddp.USES,
    **uses_hosts.USES,
}
Outcomes = Mapping[tuple[str, str], Outcome]


def test_each_public_function_has_its_use() -> None:
    named = set(USES) | set(LEFT_OUT)
    assert set(surface()) - named == set(), "these may be misused, and nobody tried"
    assert named - set(surface()) == set(), "these are not public any more"


@pytest.mark.parametrize("name", USES)
def test_a_use_speaks_of_parameters_that_there_are(name: str) -> None:
    use = USES[name]
    assert {*use.right, *use.fits, *use.says} - set(surface()[name]) == set()
    assert set().union(*use.fits.values()) - set(WRONG) == set()


@pytest.fixture
async def world() -> AsyncIterator[World]:
    """Two workers in this process, one of another group, and one that has ended."""
    other_loop = asyncio.new_event_loop()
    async with Cluster(1, names=["ended"]) as (ended,):
        pass
    async with Cluster(2) as (a, b), Cluster(1, names=["stranger"]) as (stranger,):
        yield World(a, b, stranger, ended, other_loop)
    other_loop.close()


async def sent(world: World) -> int:
    """Count the calls that `a` has ever sent to `b`, but for those that count."""
    await world.peer.call(len, "ab")  # what was on its way has been sent by now
    link = world.a.directory.find("b").link
    assert link is not None
    return link.pending.started


async def kept_by(world: World) -> dict[str, int]:
    """Count what the workers `a` and `b` keep, when what is over has been let go."""
    found: dict[str, int] = {}
    while found != (found := await _kept_now(world)):
        pass
    return found


async def _kept_now(world: World) -> dict[str, int]:
    gc.collect()
    await world.peer.call(len, "ab")  # what is let go is told
    await asyncio.sleep(0)
    return _tables_of(world.a, "a") | _tables_of(world.other, "b")


def _tables_of(worker: Worker, name: str) -> dict[str, int]:
    with acting_as(worker):
        return {f"{what} of {name}": count for what, count in tables().items()}


async def mistakes(use: Use, name: str, world: World) -> Outcomes:
    """Make every mistake of one use; return what came of each."""
    found = {}
    for parameter in surface()[name]:
        fitting = use.fits.get(parameter, ())
        for kind in WRONG:
            if kind not in fitting:
                found[parameter, kind] = await outcome_of(use, world, parameter, kind)
                await asyncio.sleep(0)
    return found


def listed(problems: Iterable[tuple[str, str, str]]) -> str:
    """Return problems for people to read: a line for those that are alike."""
    lines = defaultdict(list)
    for parameter, kind, problem in problems:
        lines[parameter, problem].append(kind)
    return "\n".join(
        f"{parameter}: {problem}: {', '.join(kinds)}"
        for (parameter, problem), kinds in lines.items()
    )


@pytest.mark.parametrize("name", USES)
async def test_a_mistake_costs_its_own_call_only(world: World, name: str) -> None:
    use = USES[name]
    assert await outcome_of(use, world) == Outcome(), "used rightly, it failed"
    began = await sent(world)
    kept = await kept_by(world)
    first = await mistakes(use, name, world)
    problems = [
        (parameter, kind, problem)
        for (parameter, kind), outcome in first.items()
        if (problem := outcome.problem(use, parameter))
    ]
    assert not problems, listed(problems)
    assert await kept_by(world) == kept
    link = world.a.directory.find("b").link
    async with Traffic(world.a).flowing():
        again = await mistakes(use, name, world)
    assert {at: one.words for at, one in again.items()} == {
        at: one.words for at, one in first.items()
    }
    assert world.a.directory.find("b").link is link
    assert await outcome_of(use, world) == Outcome(), "used rightly again, it failed"
