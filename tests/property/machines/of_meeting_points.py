"""How workers come into a group at its meeting point, and who looks after that."""

from __future__ import annotations

import itertools
from types import ModuleType
from typing import Final

from asyncrpc.core.ids import Incarnation
from asyncrpc.core.members import Member
from asyncrpc.core.membership.machine import arriving, keeping
from tests.property.machines.spec import Machine, guards


def _arrival_is_over_in_a_group(build: ModuleType) -> None:
    for state in build.ArrivalState:
        machine = build.MeetingArrival()
        machine.state = state
        assert machine.is_over is (state.name in {"MET", "TAKEN_IN"})


ARRIVAL: Final = Machine(
    name="A worker at a meeting point",
    about=(
        "How a worker gets into its group: with all others, or into one that runs. "
        "`tests/property/machines/meeting_world.py` visits every order of deaths and "
        "steps of a few workers."
    ),
    source=arriving,
    states="ArrivalState",
    starts=("WAITING",),
    begin=lambda build, _: build.MeetingArrival(),
    feed=lambda machine, event: machine.advance(event),
    stories="""
all come: WAITING -ALL_CAME-> MET
it comes back to the store at which all have met:
    WAITING -MET_BEFORE-> JOINING -ADMITTED-> TAKEN_IN
it hosts a new store, and the others say that they run:
    WAITING -OFFER-> KNOCKING -ANSWERED-> CLAIMING -CLAIMED-> ASKING
    -ADMITTED-> TAKEN_IN
the members of an offer are gone:
    WAITING -OFFER-> KNOCKING -SILENT-> WAITING -ALL_CAME-> MET
they die while it asks them:
    WAITING -OFFER-> KNOCKING -ANSWERED-> CLAIMING -CLAIMED-> ASKING -SILENT-> WAITING
the last of all has come meanwhile:
    WAITING -OFFER-> KNOCKING -ANSWERED-> CLAIMING -TOO_LATE-> WAITING -ALL_CAME-> MET
""",
    checks=(_arrival_is_over_in_a_group,),
)


def _members(*ranks: int) -> list[Member]:
    """Return members whose incarnation is 100 more than their rank."""
    return [
        Member(f"worker{rank}", rank, Incarnation(100 + rank), ()) for rank in ranks
    ]


def _only_a_store_of_the_run_gets_an_offer(build: ModuleType) -> None:
    present = _members(1, 2)
    for run, holder, offered in itertools.product(
        ("", "another", "ours"), (0, 101, 999), ((), (101,), (101, 102), (102, 101))
    ):
        finding = build.Finding(run, holder, offered)
        wanted = (
            "ABSENT"
            if run != "ours"
            else "TAKEN"
            if holder == 999
            else "CURRENT"
            if offered == (101, 102)
            else "OUTDATED"
        )
        assert build.judge(finding, "ours", 101, present).name == wanted
    assert build.judge(build.NOTHING_FOUND, "ours", 101, present).name == "ABSENT"


def _offer_names_the_first_ranked_members(build: ModuleType) -> None:
    assert build.offer_of(_members(2, -1, 1)) == _members(1, 2)
    many = _members(*range(100))
    assert build.offer_of(many) == many[: build.OFFERED_MAX]


def _few_members_look_until_all_are_there(build: ModuleType) -> None:
    """The first of those that are left, whichever those are."""
    size = 6
    for ranks in itertools.chain.from_iterable(
        itertools.combinations(range(size), count) for count in range(1, size + 1)
    ):
        for at, rank in enumerate(ranks):
            event = build.event_of_change(100 + rank, _members(*ranks, -1), size)
            wanted = "LOSS" if at < build.KEEPERS else "OTHERS_LOSS"
            assert event.name == ("COMPLETE" if len(ranks) == size else wanted)


def _pauses_grow_until_the_next_loss(build: ModuleType) -> None:
    machine, event = build.MeetingKeeping(), build.KeepingEvent
    machine.advance(event.LOSS)
    seen = []
    for _ in range(8):
        machine.advance(event.ABSENT)
        seen.append(machine.pause_s)
        machine.advance(event.TIME_UP)
    assert seen == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0, 10.0]
    machine.advance(event.ABSENT)
    machine.advance(event.LOSS)
    assert machine.pause_s == 0.5


KEEPING: Final = Machine(
    name="A member that looks after the meeting point",
    about=(
        "Who tells a store that is new that the group runs, once a member is gone "
        "([decision](../adr/0028-coming-back.md))."
    ),
    source=keeping,
    states="KeepingState",
    starts=("RESTING",),
    begin=lambda build, _: build.MeetingKeeping(),
    feed=lambda machine, event: machine.advance(event),
    stories="""
the host of the store is gone, and comes back:
    RESTING -LOSS-> LOOKING -ABSENT-> PAUSING -TIME_UP-> LOOKING -OUTDATED-> OFFERING
    -WRITTEN-> PAUSING -COMPLETE-> RESTING
another member has made the offer: RESTING -LOSS-> LOOKING -CURRENT-> PAUSING
the new host dies before it has joined: OFFERING -ABSENT-> PAUSING -TIME_UP-> LOOKING
a member of the offer dies: OFFERING -LOSS-> LOOKING
another member dies: PAUSING -LOSS-> LOOKING
members of lower ranks have come back: PAUSING -OTHERS_LOSS-> RESTING
they come back while it looks: LOOKING -OTHERS_LOSS-> RESTING
they come back while it writes: OFFERING -OTHERS_LOSS-> RESTING
all are there while it looks: LOOKING -COMPLETE-> RESTING
all are there while it writes: OFFERING -COMPLETE-> RESTING
its own rank has been started again elsewhere: LOOKING -TAKEN-> REPLACED
""",
    checks=(
        _only_a_store_of_the_run_gets_an_offer,
        _offer_names_the_first_ranked_members,
        _few_members_look_until_all_are_there,
        _pauses_grow_until_the_next_loss,
    ),
    guards=guards("""
a-store-of-another-run-gets-an-offer: if finding.run != run: => if not finding.run:
a-former-life-makes-offers:
    if finding.holder not in {UNKNOWN_INCARNATION, me}: => if False:
worker-is-replaced-by-an-unknown-one:
    if finding.holder not in {UNKNOWN_INCARNATION, me}: => if finding.holder != me:
everybody-looks: [:KEEPERS]] => ]
guests-are-offered: if member.rank >= 0) => if True)
pauses-do-not-grow: min(2 * self.pause_s => min(self.pause_s
a-loss-does-not-hurry:
    if event is KeepingEvent.LOSS: => if event is KeepingEvent.COMPLETE:
keepers-stop-before-all-are-there:
    .issuperset(range(world_size)) => .issuperset(range(world_size - 1))
"""),
)
