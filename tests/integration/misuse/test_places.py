"""Every public function, used where it cannot be: nothing beside it ends.

At each place it works, or says what is wrong; the same way the second time.  Traffic
goes on meanwhile: of the same worker, or where that ends, of another to its peer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final

import pytest

from asyncrpc import AsyncRpcError, JoinRendezvous, Worker
from asyncrpc.errors import NotStartedError
from asyncrpc.testing import Cluster
from tests.integration.misuse.conftest import others
from tests.integration.misuse.places import ENDS, PLACES, WITHOUT_WORKER
from tests.integration.misuse.traffic import Traffic
from tests.integration.misuse.uses import USES
from tests.integration.misuse.using import Outcome, Use
from tests.integration.misuse.wrong import World


def families() -> Mapping[str, Mapping[str, Use]]:
    """Return all uses by what they are of: a package, or a class at the top level."""
    uses: dict[str, dict[str, Use]] = defaultdict(dict)
    for name, use in USES.items():
        first, dot, _ = name.partition(".")
        uses[first if dot else "functions"][name] = use
    return uses


FAMILIES: Final = families()


def problem_of(use: Use, place: str, outcomes: Sequence[Outcome]) -> str:
    """Return what is wrong with what came of a use at a place; empty: nothing.

    Args:
        use: of a public function.
        place: where it was used.
        outcomes: of its attempts, two of each way.
    """
    must_refuse = use.needs_worker and place in WITHOUT_WORKER
    for outcome in outcomes:
        kind = outcome.kind
        if kind is None and must_refuse:
            return "it was accepted"
        if kind is not None and not issubclass(kind, (AsyncRpcError, *use.refusals)):
            return f"it raised {outcome.words[:400]}"
        if kind is not None and must_refuse and kind is not NotStartedError:
            return f"it says nothing of the worker: {outcome.words[:400]}"
    for first, again in zip(outcomes[::2], outcomes[1::2], strict=True):
        if first.words != again.words:
            return f"the second time it is {again.words[:400]}, not {first.words[:400]}"
    return ""


@asynccontextmanager
async def world_with_third() -> AsyncIterator[tuple[World, Worker]]:
    """Return a world, with sockets, and a worker that joined its group."""
    async with Cluster(2, network="uds") as (a, b), others() as about:
        where = JoinRendezvous(b.addresses)
        async with Worker("c", rendezvous=where) as c:
            yield World(a, b, *about), c


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
async def test_use_in_a_wrong_place_is_refused_and_ends_nothing(
    family: str, place: str
) -> None:
    uses = FAMILIES[family]
    async with world_with_third() as (world, third):
        speaks = third if place in ENDS else world.a
        async with Traffic(speaks).flowing():
            link = speaks.parts.directory.find("b").link
            connection = link and link.connection
            outcomes = await PLACES[place](uses, world)
        assert speaks.parts.directory.find("b").link is link
        assert link is not None
        assert link.connection is connection
    problems = {
        name: problem
        for name, use in uses.items()
        if (problem := problem_of(use, place, outcomes[name]))
    }
    assert not problems, "\n".join(f"{name}: {text}" for name, text in problems.items())
