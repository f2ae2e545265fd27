"""Workers, calls and references used where they cannot be: nothing beside it ends."""

from __future__ import annotations

import pytest

from asyncrpc import AsyncRpcError, NotStartedError
from tests.integration.misuse.places import PLACES
from tests.integration.misuse.traffic import Traffic
from tests.integration.misuse.uses_calls import USES
from tests.integration.misuse.using import NOTHING_RAISED, HungError
from tests.integration.misuse.wrong import World

WITHOUT_WORKER = ("before the start", "after the end", "in a forked child")
BESIDE_TRAFFIC = ("on another loop", "in another thread", "in a forked child")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", USES)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
async def test_a_wrong_place(world: World, name: str, place: str) -> None:
    use = USES[name]
    if place in BESIDE_TRAFFIC:
        async with Traffic(world.a).flowing():
            outcome = await PLACES[place](use, world)
            again = await PLACES[place](use, world)
        assert again.words == outcome.words
    else:
        outcome = await PLACES[place](use, world)
    if outcome != NOTHING_RAISED:
        assert outcome.kind is not HungError
        assert issubclass(outcome.kind or Exception, AsyncRpcError), outcome.words
    if use.needs_worker and place in WITHOUT_WORKER:
        assert outcome.kind is NotStartedError, outcome.words
