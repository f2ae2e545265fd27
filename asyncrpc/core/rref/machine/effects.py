"""The effects of the machines: messages to send, and news for this worker.

In every `Send…`, `to` is the worker that gets the message.  One to a worker that has
died since may be dropped.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeAlias

from asyncrpc.core.ids import Incarnation, RRefId


class LossCause(enum.Enum):
    OWNER_LOST = "its owner is lost"
    FREED = "its owner has freed it, after its lender died"
    NEVER_MADE = "the remote() that was to make it was refused or never sent"


@dataclass(frozen=True, slots=True)
class SendRegister:
    """User to owner: count me."""

    to: Incarnation
    rref_id: RRefId


@dataclass(frozen=True, slots=True)
class SendRegistered:
    """Owner to user: you are counted, one fork more."""

    to: Incarnation
    rref_id: RRefId


@dataclass(frozen=True, slots=True)
class SendGone:
    """Owner to user: the value does not exist, and never will."""

    to: Incarnation
    rref_id: RRefId


@dataclass(frozen=True, slots=True)
class SendRelease:
    """User to owner: so many forks come back."""

    to: Incarnation
    rref_id: RRefId
    forks: int


@dataclass(frozen=True, slots=True)
class SendLoanReturned:
    """Borrower to lender: I no longer rely on you.  Best put on a response."""

    to: Incarnation
    token: int


@dataclass(frozen=True, slots=True)
class SendProbe:
    """Owner to creator: I heard of this early; tell me if no remote() will come."""

    to: Incarnation
    rref_id: RRefId


@dataclass(frozen=True, slots=True)
class SendSettled:
    """Creator to owner: no remote() will come; you have had it, or never will."""

    to: Incarnation
    rref_id: RRefId


@dataclass(frozen=True, slots=True)
class Freed:
    """On the owner: drop the value."""

    rref_id: RRefId


@dataclass(frozen=True, slots=True)
class NotWanted:
    """On the owner: no worker asks any more for a value that was not made yet."""

    rref_id: RRefId


@dataclass(frozen=True, slots=True)
class ValueGone:
    """On the owner: fail the tasks that wait for this value; it will not come."""

    rref_id: RRefId


@dataclass(frozen=True, slots=True)
class HandlesLost:
    """On a user: every handle of this RRef fails from now on."""

    rref_id: RRefId
    cause: LossCause


@dataclass(frozen=True, slots=True)
class HandlesApart:
    """On a user: count the handles of this RRef no more; they stay lost."""

    rref_id: RRefId


@dataclass(frozen=True, slots=True)
class FindOwner:
    """On a user: a worker that was lost may be back; connect to it.

    If it cannot be reached, it is lost once more: call `UserTable.worker_lost`.
    """

    owner: Incarnation


Effect: TypeAlias = (
    SendRegister
    | SendRegistered
    | SendGone
    | SendRelease
    | SendLoanReturned
    | SendProbe
    | SendSettled
    | Freed
    | NotWanted
    | ValueGone
    | HandlesLost
    | HandlesApart
    | FindOwner
)
