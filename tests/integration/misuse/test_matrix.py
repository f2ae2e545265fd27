"""Every public function, given every wrong kind of each argument.

Each mistake ends in an error that names the argument, and nothing is sent where that
can be known here; made again amid other traffic, it fails the same way, and the traffic
goes on.  What the workers keep is afterwards as it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import ClassVar, Final

import pytest
import uvloop

from asyncrpc import Policy
from asyncrpc.testing import acting_as
from tests.integration.misuse.conftest import Sent
from tests.integration.misuse.left_out import LEFT_OUT
from tests.integration.misuse.surface import surface
from tests.integration.misuse.traffic import Traffic, tables_there
from tests.integration.misuse.uses import USES
from tests.integration.misuse.uses_values import value_uses
from tests.integration.misuse.using import NOTHING_RAISED, Outcome, Use
from tests.integration.misuse.wrong import WRONG, World
from tests.soak.readings import tables

GENEROUS_S: Final = 30.0
Outcomes = Mapping[tuple[str, str], Outcome]


def test_public_functions_all_have_a_use() -> None:
    named = set(USES) | set(LEFT_OUT)
    assert set(surface()) - named == set(), "these may be misused, and nobody tried"
    assert named - set(surface()) == set(), "these are not public any more"


@pytest.mark.parametrize("name", USES)
def test_uses_name_existing_parameters(name: str) -> None:
    use = USES[name]
    assert {*use.right, *use.fits, *use.says} - set(surface()[name]) == set()
    assert set().union(*use.fits.values()) - set(WRONG) == set()


async def kept_by(world: World) -> dict[str, int]:
    """Count what the workers `a` and `b` keep, when what is over has been let go."""
    counts: dict[str, int] = {}
    while counts != (counts := await _kept_now(world)):
        pass
    return counts


async def _kept_now(world: World) -> dict[str, int]:
    gc.collect()
    await world.peer.call(len, "ab")  # what is let go is told
    await asyncio.sleep(0)
    with acting_as(world.a):
        counts = {f"{what} of a": count for what, count in tables().items()}
    there = await world.peer.call(tables_there)
    return counts | {f"{what} of b": count for what, count in there.items()}


async def more_than(kept: dict[str, int], world: World) -> dict[str, int]:
    """Return what the workers keep more of than before, when nothing is on its way.

    What a mistake has set off may take its time on a busy machine: only what stays is
    more.
    """
    more = {"not counted": 1}
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(GENEROUS_S):
            while more:
                now = await kept_by(world)
                more = {what: n for what, n in now.items() if n > kept[what]}
    return more


async def mistakes(use: Use, name: str, world: World) -> Outcomes:
    """Make every mistake of one use; return what came of each."""
    outcomes = {}
    for parameter in surface()[name]:
        fitting = use.fits.get(parameter, ())
        for kind in WRONG:
            if kind not in fitting:
                outcomes[parameter, kind] = await use.outcome(world, parameter, kind)
                await asyncio.sleep(0)
    return outcomes


def listed(problems: Iterable[tuple[str, str, str]]) -> str:
    """Return problems for people to read: a line for those that are alike."""
    lines = defaultdict(list)
    for parameter, kind, problem in problems:
        lines[parameter, problem[:90]].append(kind)
    return "\n".join(
        f"{parameter}: {problem}: {', '.join(kinds)}"
        for (parameter, problem), kinds in lines.items()
    )


async def make_mistakes(world: World, sent: Sent, name: str, use: Use) -> None:
    assert await use.outcome(world) == NOTHING_RAISED, "used rightly, it failed"
    kept = await kept_by(world)
    before = sent.requests
    first = await mistakes(use, name, world)
    asked = sent.requests - before
    problems = [
        (parameter, kind, problem)
        for (parameter, kind), outcome in first.items()
        if (problem := outcome.problem(use, parameter))
    ]
    assert not problems, listed(problems)
    if not use.is_found_there:
        assert not asked, "what was refused here was sent"
    # What the right use had begun may have ended meanwhile.
    assert await more_than(kept, world) == {}
    link = world.a.parts.directory.find("b").link
    async with Traffic(world.a).flowing():
        again = await mistakes(use, name, world)
    assert {at: outcome.words for at, outcome in again.items()} == {
        at: outcome.words for at, outcome in first.items()
    }
    assert world.a.parts.directory.find("b").link is link
    assert await use.outcome(world) == NOTHING_RAISED, "used rightly again, it failed"


class TestArguments:
    # What is wrong with an argument does not depend on the loop.
    loops: ClassVar = {"uvloop": uvloop.new_event_loop}

    @pytest.mark.parametrize("name", USES)
    async def test_mistake_fails_its_call_only(
        self, world: World, sent: Sent, name: str
    ) -> None:
        await make_mistakes(world, sent, name, USES[name])

    @pytest.mark.parametrize("policy", Policy)
    @pytest.mark.parametrize("name", value_uses())
    async def test_unsendable_value_fails_its_own_call_only(
        self, world_of: World, sent: Sent, policy: Policy, name: str
    ) -> None:
        await make_mistakes(world_of, sent, name, value_uses(policy)[name])
