"""What a share costs, in messages, against PyTorch's four.

There, a share between two users takes FORK_REQUEST, ACK, CHILD_ACCEPT and ACK, whether
the reference is kept or not.
"""

from __future__ import annotations

from collections import Counter

import pytest

from asyncrpc.core.ids import RRefId
from tests.property.rref_world import Node, World

TORCH = 4


@pytest.fixture
def world() -> World:
    return World(workers=3)


def confirmed_reference(world: World) -> tuple[Node, Node, Node, RRefId]:
    """Return creator, owner, third worker and a confirmed RRef; nothing is counted."""
    creator, owner, third = world.alive.values()
    rref_id = world.remote(creator, owner.id, is_large=False)
    world.settle_down()
    world.counted.clear()
    return creator, owner, third, rref_id


def cost(world: World) -> Counter[str]:
    """Let everything arrive; count the messages that carry no call of the user's."""
    world.settle_down()
    return world.counted - Counter({"loan": 99, "fork": 99, "home": 99, "create": 99})


def test_unkept_borrow_costs_a_token_on_the_response(world: World) -> None:
    creator, _, third, rref_id = confirmed_reference(world)
    world.share(creator, third.id, rref_id)
    world.deliver((creator.id, third.id))
    world.drop(third, rref_id)
    assert cost(world) == {"returned": 1}


def test_kept_borrow_costs_three_messages(world: World) -> None:
    creator, _, third, rref_id = confirmed_reference(world)
    world.share(creator, third.id, rref_id)
    kept = cost(world)
    assert kept == {"register": 1, "registered": 1, "returned": 1}
    assert kept.total() < TORCH


def test_borrow_kept_before_birth_costs_four_messages(world: World) -> None:
    creator, owner, third = world.alive.values()
    rref_id = world.remote(creator, owner.id, is_large=True)
    world.share(creator, third.id, rref_id)
    world.deliver((creator.id, third.id))
    world.end_call(third, 0)
    world.deliver((third.id, owner.id))
    early = cost(world)
    probed = {"probe": 1, "register": 1, "registered": 1, "returned": 1}
    assert early - Counter({"confirmed": 1}) == probed
    assert (early - Counter({"confirmed": 1})).total() <= TORCH


def test_second_share_costs_a_token(world: World) -> None:
    creator, _, third, rref_id = confirmed_reference(world)
    world.share(creator, third.id, rref_id)
    world.settle_down()
    world.counted.clear()
    world.share(creator, third.id, rref_id)
    assert cost(world) == {"returned": 1}


def test_share_with_the_owner_costs_a_token_on_the_response(world: World) -> None:
    creator, owner, _, rref_id = confirmed_reference(world)
    world.share(creator, owner.id, rref_id)
    assert cost(world) == {"returned": 1}


def test_reference_handed_out_by_its_owner_costs_nothing(world: World) -> None:
    _, owner, third, _ = confirmed_reference(world)
    world.share(owner, third.id, world.own(owner))
    assert cost(world) == {}


def test_many_forks_return_in_one_message(world: World) -> None:
    _, owner, third, _ = confirmed_reference(world)
    rref_id = world.own(owner)
    for _ in range(5):
        world.share(owner, third.id, rref_id)
    world.settle_down()
    for _ in range(5):
        world.drop(third, rref_id)
    assert cost(world) == {"release": 1}
    assert owner.owned.holders(rref_id) == {}
