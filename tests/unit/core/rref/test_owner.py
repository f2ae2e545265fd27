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
    EntryState,
    Freed,
    HoldingEvent,
    HoldingState,
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

ME, CREATOR, LENDER, BORROWER = map(Incarnation, (1, 2, 3, 4))
MINE = RRefId(ME, 1)
THEIRS = RRefId(CREATOR, 1)


@pytest.fixture
def table() -> OwnerTable:
    return OwnerTable(ME)


def test_value_is_freed_with_its_last_holder(table: OwnerTable) -> None:
    assert table.create(THEIRS, CREATOR) == []
    table.hand_out(THEIRS, BORROWER)
    table.hand_out(THEIRS, BORROWER)
    assert table.holders(THEIRS) == {CREATOR: 1, BORROWER: 2}
    assert table.release(THEIRS, BORROWER, 2) == []
    assert table.release(THEIRS, CREATOR, 1) == [Freed(THEIRS)]
    assert len(table) == 0


def test_local_handle_keeps_the_value(table: OwnerTable) -> None:
    table.create(MINE)
    table.hand_out(MINE, BORROWER)
    table.local_acquire(MINE)
    assert table.local_release(MINE) == []
    assert table.release(MINE, BORROWER, 1) == []
    assert table.local_release(MINE) == [Freed(MINE)]


def test_undone_hand_out_counts_nothing(table: OwnerTable) -> None:
    table.create(MINE)
    table.hand_out(MINE, BORROWER)
    assert table.undo_hand_out(MINE, BORROWER) == []
    assert table.holders(MINE) == {}


def test_references_of_a_dead_worker_are_dropped_in_parts(table: OwnerTable) -> None:
    held = [RRefId(ME, serial) for serial in range(1, 6)]
    for rref_id in held:
        table.create(rref_id)
        table.hand_out(rref_id, BORROWER)
        table.local_release(rref_id)
    table.register(THEIRS, BORROWER)  # waits for its value
    assert table.kept_for(BORROWER) == 6
    assert table.kept_for(CREATOR) == 1  # which is to make it
    freed = table.worker_lost(BORROWER, 4)
    assert freed == [Freed(rref_id) for rref_id in held[:4]]
    assert table.kept_for(BORROWER) == 2
    rest = [Freed(held[4]), NotWanted(THEIRS)]
    assert table.worker_lost(BORROWER, 4) == rest
    assert (len(table), table.kept_for(BORROWER)) == (0, 0)


def test_undo_for_a_dead_worker_changes_nothing(table: OwnerTable) -> None:
    table.create(MINE)
    table.hand_out(MINE, BORROWER)
    table.worker_lost(BORROWER)
    assert table.undo_hand_out(MINE, BORROWER) == []
    table.hand_out(MINE, BORROWER)
    assert table.holders(MINE) == {}
    assert table.undo_hand_out(THEIRS, BORROWER) == []


@pytest.mark.parametrize("forks", [-1, 0, 2])
def test_release_of_more_than_is_held_is_refused(table: OwnerTable, forks: int) -> None:
    table.create(THEIRS, CREATOR)
    with pytest.raises(RemoteProtocolError, match="holds 1"):
        table.release(THEIRS, CREATOR, forks)
    assert table.holders(THEIRS) == {CREATOR: 1}
    with pytest.raises(RemoteProtocolError, match="holds 0"):
        table.release(MINE, CREATOR, 1)


def test_id_is_created_once(table: OwnerTable) -> None:
    table.create(THEIRS, CREATOR)
    with pytest.raises(RemoteProtocolError, match="made twice"):
        table.create(THEIRS, CREATOR)


def test_borrower_that_keeps_the_reference_is_counted(table: OwnerTable) -> None:
    table.create(THEIRS, CREATOR)
    assert table.register(THEIRS, BORROWER) == [SendRegistered(BORROWER, THEIRS)]
    assert table.holders(THEIRS) == {CREATOR: 1, BORROWER: 1}


def test_borrower_ahead_of_the_remote_call_waits_for_it(table: OwnerTable) -> None:
    assert table.register(THEIRS, BORROWER) == [SendProbe(CREATOR, THEIRS)]
    assert table.register(THEIRS, LENDER) == []
    assert table.state(THEIRS) is EntryState.UNBORN
    born = [SendRegistered(BORROWER, THEIRS), SendRegistered(LENDER, THEIRS)]
    assert table.create(THEIRS, CREATOR) == born
    assert table.state(THEIRS) is EntryState.LIVE
    assert table.holders(THEIRS) == {CREATOR: 1, BORROWER: 1, LENDER: 1}
    assert table.settled(THEIRS, CREATOR) == []  # its answer crossed the birth


def test_full_table_refuses_to_wait_for_further_values() -> None:
    table = OwnerTable(ME, entries_max=2)
    table.create(MINE)
    assert table.register(THEIRS, BORROWER) == [SendProbe(CREATOR, THEIRS)]
    more = RRefId(CREATOR, 2)
    assert table.register(more, BORROWER) == [SendGone(BORROWER, more)]
    assert table.register(MINE, BORROWER) == [SendRegistered(BORROWER, MINE)]
    assert table.create(more, CREATOR) == []  # whether to make it is decided before
    assert len(table) == 3


def test_value_settled_as_never_made_is_gone(table: OwnerTable) -> None:
    table.register(THEIRS, BORROWER)
    assert table.settled(THEIRS, CREATOR) == [SendGone(BORROWER, THEIRS)]
    assert len(table) == 0
    assert table.settled(THEIRS, CREATOR) == []


def test_creator_alone_settles_a_value(table: OwnerTable) -> None:
    table.register(THEIRS, BORROWER)
    with pytest.raises(RemoteProtocolError, match="did not make"):
        table.settled(THEIRS, BORROWER)
    assert table.state(THEIRS) is EntryState.UNBORN


def test_death_of_the_creator_ends_the_wait(table: OwnerTable) -> None:
    table.pin(THEIRS)
    table.register(THEIRS, BORROWER)
    lost = table.worker_lost(CREATOR)
    assert lost == [SendGone(BORROWER, THEIRS), ValueGone(THEIRS)]
    assert table.state(THEIRS) is EntryState.GONE
    assert table.create(THEIRS, CREATOR) == [Freed(THEIRS)]  # decoded after its death
    assert table.unpin(THEIRS) == []
    assert len(table) == 0


@pytest.mark.parametrize("rref_id", [THEIRS, MINE])
def test_value_mentioned_before_its_creation_can_be_created(
    table: OwnerTable, rref_id: RRefId
) -> None:
    """Or a stranger could take the number of the next value."""
    table.came_home(rref_id)
    table.settled(rref_id, rref_id.creator)
    assert table.state(rref_id) is EntryState.GONE
    maker = None if rref_id is MINE else CREATOR
    assert table.create(rref_id, maker) == []
    assert table.state(rref_id) is EntryState.LIVE
    assert table.local_release(rref_id) == []
    assert table.state(rref_id) is EntryState.LIVE
    freed = (
        table.local_release(MINE) if maker is None else table.release(rref_id, maker, 1)
    )
    assert freed == [Freed(rref_id)]


def test_released_local_value_is_gone_at_once(table: OwnerTable) -> None:
    table.create(MINE)
    table.local_release(MINE)
    assert table.register(MINE, BORROWER) == [SendGone(BORROWER, MINE)]
    assert table.pin(MINE) == [ValueGone(MINE)]
    table.local_acquire(MINE)  # decoded all the same: the handle fails when used
    with pytest.raises(RRefDeletedError, match="freed, or never made"):
        table.hand_out(MINE, BORROWER)
    assert table.unpin(MINE) == []
    assert table.local_release(MINE) == []
    assert len(table) == 0


def test_returned_reference_is_a_local_handle_of_the_owner(table: OwnerTable) -> None:
    table.create(THEIRS, CREATOR)
    assert table.came_home(THEIRS) == []
    assert table.release(THEIRS, CREATOR, 1) == []
    assert table.local_release(THEIRS) == [Freed(THEIRS)]
    assert table.came_home(MINE) == [ValueGone(MINE)]
    assert table.local_release(MINE) == []
    assert len(table) == 0


def test_forgiven_worker_begins_anew(table: OwnerTable) -> None:
    table.create(THEIRS, CREATOR)
    assert table.worker_lost(CREATOR) == [Freed(THEIRS)]
    assert table.is_lost(CREATOR)
    table.forgive(CREATOR)
    assert not table.is_lost(CREATOR)
    later = RRefId(CREATOR, 2)
    assert table.create(later, CREATOR) == []
    assert table.holders(later) == {CREATOR: 1}
    # It is asked again for what it may be about to make.
    assert table.register(RRefId(CREATOR, 3), BORROWER) == [
        SendProbe(CREATOR, RRefId(CREATOR, 3))
    ]


def test_unborn_value_without_waiters_is_forgotten(table: OwnerTable) -> None:
    assert table.pin(THEIRS) == [SendProbe(CREATOR, THEIRS)]
    assert table.unpin(THEIRS) == [NotWanted(THEIRS)]
    assert len(table) == 0
    assert table.worker_lost(CREATOR) == []


def test_unborn_value_is_forgotten_with_its_last_handle(table: OwnerTable) -> None:
    assert table.came_home(THEIRS) == [SendProbe(CREATOR, THEIRS)]
    assert table.register(THEIRS, BORROWER) == []
    assert table.local_release(THEIRS) == []  # BORROWER waits for it
    assert table.worker_lost(BORROWER) == [NotWanted(THEIRS)]
    assert len(table) == 0


def test_death_of_a_worker_drops_all_its_references(table: OwnerTable) -> None:
    other = RRefId(CREATOR, 2)
    table.create(THEIRS, CREATOR)
    table.create(other, CREATOR)
    table.register(other, BORROWER)
    assert table.worker_lost(CREATOR) == [Freed(THEIRS)]
    assert table.holders(other) == {BORROWER: 1}
    assert table.worker_lost(BORROWER) == [Freed(other)]


def test_dead_worker_does_not_return(table: OwnerTable) -> None:
    table.create(MINE)
    table.worker_lost(BORROWER)
    assert table.register(MINE, BORROWER) == []
    assert table.release(MINE, BORROWER, 1) == []
    assert table.holders(MINE) == {}


def test_fork_of_an_unborn_value_survives_a_registration(table: OwnerTable) -> None:
    """Handed out before birth and registered too: the death frees the wait, once."""
    table.pin(THEIRS)
    table.hand_out(THEIRS, BORROWER)
    table.register(THEIRS, BORROWER)
    assert table.undo_hand_out(THEIRS, BORROWER) == []
    table.hand_out(THEIRS, BORROWER)
    gone = table.settled(THEIRS, CREATOR)
    assert gone == [SendGone(BORROWER, THEIRS), ValueGone(THEIRS)]
    assert table.holders(THEIRS) == {BORROWER: 1}
    table.unpin(THEIRS)
    assert table.release(THEIRS, BORROWER, 1) == []
    assert len(table) == 0


def test_unpinned_value_cannot_be_unpinned_or_released(table: OwnerTable) -> None:
    table.create(THEIRS, CREATOR)
    for wrong in (table.unpin, table.local_release, table.local_acquire):
        with pytest.raises(LocalProtocolError):
            wrong(THEIRS)


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
    drawn = text.split("```mermaid\n", 1)[1].split("\n```", 1)[0]
    assert drawn == diagram()


def test_every_state_has_a_row() -> None:
    assert TRANSITIONS.keys() == set(HoldingState)


def test_every_event_occurs_in_the_table() -> None:
    assert {event for row in TRANSITIONS.values() for event in row} == set(HoldingEvent)


@pytest.mark.parametrize(
    "state", [state for state in HoldingState if state is not HoldingState.RELEASED]
)
def test_every_state_leads_to_release(state: HoldingState) -> None:
    reached = {state}
    while True:
        more = {after for state in reached for after in TRANSITIONS[state].values()}
        if more <= reached:
            break
        reached |= more
    assert HoldingState.RELEASED in reached


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


if __name__ == "__main__":
    print(diagram())  # noqa: T201  # to be pasted
