"""How a worker arrives at the meeting point: it meets all others, or joins a group.

    WAITING -all have come-> MET
    WAITING -an offer-> KNOCKING -answered-> CLAIMING -> ASKING -> TAKEN_IN

A meeting ends by one *word*, an entry of the store that is written once: all have come,
or a group runs.  Either is final.  So no worker begins a new group while another one
joins the former: before a worker asks the members of an offer, it must have given the
word that they run, or have read it.

If all members of the offer turn out to be gone, the workers at the store meet again, in
the next *round*, which has a word of its own.  A new group needs all ranks, in one
round.  An admitted worker is in no round, so once some have been admitted, no new group
can begin: the others find those by their newer offer.

The host's own store is like any other.  If it is lost, all begin anew at the next one.

Sans-IO: the service reads and writes, knocks and asks.
"""

from __future__ import annotations

import enum
from typing import Final

from asyncrpc.core.state_table import StateTable


class ArrivalState(enum.Enum):
    """What a worker must do now."""

    WAITING = "publish the record, and wait for the word or an offer"
    KNOCKING = "find out whether a member of the offer listens"
    CLAIMING = "give the word that a group runs"
    ASKING = "ask the members of the offer to admit this worker"
    JOINING = "ask the members that met here before"
    MET = "nothing: all have come, and this is a new group"
    TAKEN_IN = "nothing: this worker is in the group that ran"


class ArrivalEvent(enum.Enum):
    """An event on a worker's way into its group."""

    ALL_CAME = "the word is that all have come, this worker among them"
    MET_BEFORE = "all have come before, a former life of this worker among them"
    OFFER = "there is an offer"
    SILENT = "no member of the offer can be reached"
    ANSWERED = "a member of the offer listens"
    CLAIMED = "the word is that a group runs"
    TOO_LATE = "another word was given before"
    ADMITTED = "a member has admitted this worker"


_S, _E = ArrivalState, ArrivalEvent

TRANSITIONS: Final = StateTable(
    "a worker on its way into a group",
    {
        _S.WAITING: {
            _E.ALL_CAME: _S.MET,
            _E.MET_BEFORE: _S.JOINING,
            _E.OFFER: _S.KNOCKING,
        },
        _S.KNOCKING: {_E.SILENT: _S.WAITING, _E.ANSWERED: _S.CLAIMING},
        _S.CLAIMING: {_E.CLAIMED: _S.ASKING, _E.TOO_LATE: _S.WAITING},
        _S.ASKING: {_E.ADMITTED: _S.TAKEN_IN, _E.SILENT: _S.WAITING},
        _S.JOINING: {_E.ADMITTED: _S.TAKEN_IN},
        _S.MET: {},
        _S.TAKEN_IN: {},
    },
)


class MeetingArrival:
    """One worker's way into its group.

    Attributes:
        state: what the worker must do now.
    """

    __slots__ = ("state",)

    def __init__(self) -> None:
        self.state = ArrivalState.WAITING

    def advance(self, event: ArrivalEvent) -> None:
        """Advance by one event."""
        self.state = TRANSITIONS.after(self.state, event)

    @property
    def is_over(self) -> bool:
        """Whether this worker is in a group."""
        return not TRANSITIONS[self.state]
