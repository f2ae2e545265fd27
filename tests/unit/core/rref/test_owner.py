"""The owner's table, its picture in the reference, and what a share costs in messages.

$ python -m tests.unit.core.rref.test_owner    # prints the picture
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from asyncrpc.core.ids import Incarnation, RRefId
from asyncrpc.core.rref.machine import (
    TRANSITIONS,
    Freed,
    NotWanted,
    OwnerTable,
    SendGone,
    SendProbe,
    SendRegistered,
    ValueGone,
)
from asyncrpc.core.rref.machine.index import TOMBSTONES_MAX
from asyncrpc.errors import (
    LocalProtocolError,
    RemoteProtocolError,
    RRefDeletedError,
)
from tests.property.rref_world import Node, World
from tests.unit.stories import Actions, Words, cases

ME, CREATOR, LENDER, BORROWER = map(Incarnation, (1, 2, 3, 4))
MINE, THEIRS = RRefId(ME, 1), RRefId(CREATOR, 1)
WORDS = Words(
    subject=THEIRS,
    names={
        "mine": MINE,
        "mine-2": RRefId(ME, 2),
        "theirs": THEIRS,
        "theirs-2": RRefId(CREATOR, 2),
        "theirs-3": RRefId(CREATOR, 3),
        "creator": CREATOR,
        "lender": LENDER,
        "borrower": BORROWER,
    },
    effects={
        "freed": Freed,
        "not-wanted": NotWanted,
        "value-gone": ValueGone,
        "gone": lambda rref, to: SendGone(to, rref),
        "probe": lambda rref: SendProbe(CREATOR, rref),
        "registered": lambda rref, to: SendRegistered(to, rref),
    },
    errors={
        "local": LocalProtocolError,
        "remote": RemoteProtocolError,
        "deleted": RRefDeletedError,
    },
)
STORIES = """
value is freed with its last holder:
    create creator; hand-out borrower; hand-out borrower
    held creator = 1; held borrower = 2
    release borrower 2; release creator 1 = freed; len = 0
local handle keeps the value:
    create mine; hand-out mine borrower; acquire mine; drop mine
    release mine borrower 1; drop mine = freed mine
undone hand-out counts nothing:
    create mine; hand-out mine borrower; undo mine borrower; holders mine = 0
references of a dead worker are dropped in parts:  # one waits for its value
    create mine; hand-out mine borrower; drop mine
    create mine-2; hand-out mine-2 borrower; drop mine-2
    register borrower = probe; kept-for borrower = 3; kept-for creator = 1
    lose borrower 1 = freed mine; kept-for borrower = 2
    lose borrower 4 = freed mine-2, not-wanted
    len = 0; kept-for borrower = 0
undo for a dead worker changes nothing:
    create mine; hand-out mine borrower; lose borrower; undo mine borrower
    hand-out mine borrower; holders mine = 0; undo borrower
release of more than is held is refused:
    create creator; release creator -1 ! remote holds 1
    release creator 0 ! remote holds 1; release creator 2 ! remote holds 1
    held creator = 1; release mine creator 1 ! remote holds 0
id is created once:
    create creator; create creator ! remote made twice
borrower that keeps the reference is counted:
    create creator; register borrower = registered borrower
    held creator = 1; held borrower = 1
borrower ahead of the remote call waits for it:  # its answer may cross the birth
    register borrower = probe; register lender; state = UNBORN
    create creator = registered borrower, registered lender; state = LIVE
    held creator = 1; held borrower = 1; held lender = 1; settled creator
value settled as never made is gone:
    register borrower = probe; settled creator = gone borrower; len = 0; settled creator
creator alone settles a value:
    register borrower = probe; settled borrower ! remote did not make; state = UNBORN
death of the creator ends the wait:  # and the value is freed if it is decoded later
    pin = probe; register borrower; lose creator = gone borrower, value-gone
    state = GONE; create creator = freed; unpin; len = 0
# Or a stranger could take the number of the next value.
value mentioned before its creation can be created:
    home = probe; settled creator = value-gone; state = GONE
    create creator; state = LIVE; drop; state = LIVE; release creator 1 = freed
local value mentioned before its creation can be created:
    home mine = value-gone mine; state mine = GONE
    create mine; state mine = LIVE; drop mine; state mine = LIVE; drop mine = freed mine
released local value is gone at once:  # a handle that is decoded fails when used
    create mine; drop mine = freed mine; register mine borrower = gone mine borrower
    pin mine = value-gone mine; acquire mine
    hand-out mine borrower ! deleted freed, or never made
    unpin mine; drop mine; len = 0
returned reference is a local handle of the owner:
    create creator; home; release creator 1; drop = freed
    home mine = value-gone mine; drop mine; len = 0
forgiven worker begins anew:  # it is asked again for what it may be about to make
    create creator; lose creator = freed; is-lost creator = True
    forgive creator; is-lost creator = False; create theirs-2 creator
    held theirs-2 creator = 1; register theirs-3 borrower = probe theirs-3
unborn value without waiters is forgotten:
    pin = probe; unpin = not-wanted; len = 0; lose creator
unborn value is forgotten with its last handle:  # the borrower waits for it
    home = probe; register borrower; drop; lose borrower = not-wanted; len = 0
death of a worker drops all its references:
    create creator; create theirs-2 creator
    register theirs-2 borrower = registered theirs-2 borrower; lose creator = freed
    held theirs-2 borrower = 1; holders theirs-2 = 1; lose borrower = freed theirs-2
dead worker does not return:
    create mine; lose borrower; register mine borrower; release mine borrower 1
    holders mine = 0
# Handed out before birth and registered too: the death frees the wait, once.
fork of an unborn value survives a registration:
    pin = probe; hand-out borrower; register borrower; undo borrower; hand-out borrower
    settled creator = gone borrower, value-gone; held borrower = 1
    unpin; release borrower 1; len = 0
unpinned value cannot be unpinned or released:
    create creator; unpin ! local .; drop ! local .; acquire ! local .
"""


@cases(STORIES)
def test_owner_follows_the_story(steps: list[str]) -> None:
    table = OwnerTable(ME)
    actions: Actions = {
        "create": table.create,
        "register": table.register,
        "hand-out": table.hand_out,
        "undo": table.undo_hand_out,
        "acquire": table.local_acquire,
        "drop": table.local_release,
        "release": table.release,
        "home": table.came_home,
        "pin": table.pin,
        "unpin": table.unpin,
        "settled": table.settled,
        "lose": lambda _, worker, *most: table.worker_lost(worker, *most),
        "forgive": lambda _, worker: table.forgive(worker),
        "is-lost": lambda _, worker: table.is_lost(worker),
        "kept-for": lambda _, worker: table.kept_for(worker),
        "held": lambda rref, holder: table.holders(rref).get(holder, 0),
        "holders": lambda rref: len(table.holders(rref)),
        "state": lambda rref: table.state(rref).name,
        "len": lambda _: len(table),
    }
    WORDS.play(steps, actions)


def test_full_table_refuses_to_wait_for_further_values() -> None:
    table = OwnerTable(ME, entries_max=2)
    table.create(MINE)
    assert table.register(THEIRS, BORROWER) == [SendProbe(CREATOR, THEIRS)]
    more = RRefId(CREATOR, 2)
    assert table.register(more, BORROWER) == [SendGone(BORROWER, more)]
    assert table.register(MINE, BORROWER) == [SendRegistered(BORROWER, MINE)]
    assert table.create(more, CREATOR) == []  # whether to make it is decided before
    assert len(table) == 3


@pytest.fixture
def table() -> OwnerTable:
    return OwnerTable(ME)


def test_memory_of_dead_workers_is_bounded(table: OwnerTable) -> None:
    for dead in range(TOMBSTONES_MAX + 10):
        table.worker_lost(Incarnation(100 + dead))
    table.create(MINE)
    assert table.register(MINE, Incarnation(100)) != []  # the oldest is forgotten
    assert table.register(MINE, Incarnation(110)) == []


DOC = Path(__file__).parents[4] / "docs" / "reference" / "rref-protocol.md"


def diagram() -> str:
    """Draw `TRANSITIONS` as mermaid text, without the steps that stay in a state."""
    lines = ["stateDiagram-v2"]
    starts = ("PENDING: remote()", "BORROWED: loan", "CONFIRMED: fork")
    lines += [f"    [*] --> {start}" for start in starts]
    for state, row in TRANSITIONS.items():
        lines += [
            f"    {state.name} --> {after.name}: {event.value}"
            for event, after in row.items()
            if after is not state
        ]
    lines.append("    RELEASED --> [*]")
    return "\n".join(lines)


def test_picture_shows_the_transition_table() -> None:
    text = DOC.read_text(encoding="utf-8")
    assert text.split("```mermaid\n", 1)[1].split("\n```", 1)[0] == diagram()


TORCH = 4  # FORK_REQUEST, ACK, CHILD_ACCEPT, ACK: whether the reference is kept or not


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
    world.share(creator, third.id, world.remote(creator, owner.id, is_large=True))
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


if __name__ == "__main__":
    print(diagram())  # noqa: T201  # to be pasted
