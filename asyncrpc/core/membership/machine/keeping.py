"""How a meeting point learns which members run, once one of them is gone.

    RESTING -loss-> LOOKING -no store-> PAUSING -later-> LOOKING
                    LOOKING -a store that does not know-> OFFERING -> PAUSING
                    all ranks are there again -> RESTING

The process that hosted the store may have been the one that is gone.  If it comes back,
its store is empty; a worker that comes there must learn that the group runs.  So the
first few of the remaining members look whether there is a store of this run, and write
an *offer* there: some members that can admit a worker.  All of them write the same, so
it does not matter how many do.  They go on looking until all ranks are there: a host
may die again before it has joined, and no message reports that.

An offer is a hint.  Whether a member lives shows when it is asked, and whether a new
group begins is decided in `arriving`.

Sans-IO: `judge` says what a look has found, and the service looks, writes and waits.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from asyncrpc.core.ids import Incarnation
from asyncrpc.core.members import UNKNOWN_INCARNATION, Member
from asyncrpc.core.state_table import StateTable

KEEPERS: Final = 3  # members that look after the meeting point: two of them may fail
OFFERED_MAX: Final = 16  # members in an offer; each loss of one makes a new offer
PAUSE_S: Final = 0.5  # between the first two looks; each further pause is longer
PAUSE_MAX_S: Final = 10.0  # a host that stays away costs its survivors next to nothing


class KeepingState(enum.Enum):
    """What a member must do about the meeting point."""

    RESTING = "nothing: all ranks are there, or other members look after it"
    LOOKING = "look what is there"
    OFFERING = "write there which members run"
    PAUSING = "wait, then look again"
    REPLACED = "nothing any more: another life of this worker has come there"


class KeepingEvent(enum.Enum):
    """An event for a member that looks after the meeting point."""

    LOSS = "a member is gone, and this one is among the first that are left"
    OTHERS_LOSS = "a member is gone, and others look after the meeting point"
    COMPLETE = "all ranks are there again"
    CURRENT = "the store there has an offer of the present members"
    OUTDATED = "the store there is of this run, without such an offer"
    ABSENT = "there is no store of this run"
    TAKEN = "a later life of this worker has come there"
    WRITTEN = "the offer has been written"
    TIME_UP = "the pause is over"


_S, _E = KeepingState, KeepingEvent

TRANSITIONS: Final = StateTable(
    "a member that looks for a split of its group",
    {
        _S.RESTING: {_E.LOSS: _S.LOOKING},
        _S.LOOKING: {
            _E.OTHERS_LOSS: _S.RESTING,
            _E.COMPLETE: _S.RESTING,
            _E.CURRENT: _S.PAUSING,
            _E.OUTDATED: _S.OFFERING,
            _E.ABSENT: _S.PAUSING,
            _E.TAKEN: _S.REPLACED,
        },
        _S.OFFERING: {
            _E.LOSS: _S.LOOKING,  # the one that is gone may be in the offer
            _E.OTHERS_LOSS: _S.RESTING,
            _E.COMPLETE: _S.RESTING,
            _E.WRITTEN: _S.PAUSING,
            _E.ABSENT: _S.PAUSING,
        },
        _S.PAUSING: {
            _E.LOSS: _S.LOOKING,
            _E.OTHERS_LOSS: _S.RESTING,
            _E.COMPLETE: _S.RESTING,
            _E.TIME_UP: _S.LOOKING,
        },
        _S.REPLACED: {},
    },
    late=KeepingEvent,
)


@dataclass(frozen=True, slots=True)
class Finding:
    """What a look at the meeting point has found.

    Attributes:
        run: the run whose workers came to the store; empty if none has come.
        holder: the last incarnation of this rank that came; 0 if none has come.
        offered: the incarnations in the offer; empty without an offer.
    """

    run: str = ""
    holder: Incarnation = UNKNOWN_INCARNATION
    offered: tuple[Incarnation, ...] = ()


NOTHING_FOUND: Final = Finding()


def judge(
    finding: Finding, run: str, me: Incarnation, present: Iterable[Member]
) -> KeepingEvent:
    """Return the event that a look means for the member that has looked."""
    if finding.run != run:
        return KeepingEvent.ABSENT
    if finding.holder not in {UNKNOWN_INCARNATION, me}:
        return KeepingEvent.TAKEN
    offered = tuple(member.incarnation for member in offer_of(present))
    return KeepingEvent.CURRENT if finding.offered == offered else KeepingEvent.OUTDATED


def offer_of(present: Iterable[Member]) -> list[Member]:
    """Return the members that an offer names: the first that are there, by rank."""
    ranked = (member for member in present if member.rank >= 0)
    return sorted(ranked, key=lambda member: member.rank)[:OFFERED_MAX]


def event_of_change(
    me: Incarnation, present: Sequence[Member], world_size: int
) -> KeepingEvent:
    """Return the event for a member when a life of another one ends or begins."""
    if {member.rank for member in present}.issuperset(range(world_size)):
        return KeepingEvent.COMPLETE
    first = [member.incarnation for member in offer_of(present)[:KEEPERS]]
    return KeepingEvent.LOSS if me in first else KeepingEvent.OTHERS_LOSS


class MeetingKeeping:
    """What one member must do about the meeting point of its group.

    Attributes:
        state: what the member must do now.
        pause_s: how long the present or next pause is, in seconds.
    """

    __slots__ = ("pause_s", "state")

    def __init__(self) -> None:
        self.state = KeepingState.RESTING
        self.pause_s = PAUSE_S

    def advance(self, event: KeepingEvent) -> None:
        """Advance by one event; one that the state does not list changes nothing."""
        if event not in TRANSITIONS[self.state]:
            return
        self.state = TRANSITIONS.after(self.state, event)
        if event is KeepingEvent.LOSS:
            self.pause_s = PAUSE_S
        elif event is KeepingEvent.TIME_UP:
            self.pause_s = min(2 * self.pause_s, PAUSE_MAX_S)
