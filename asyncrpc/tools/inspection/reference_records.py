"""What a worker tells of its references, in the form that is sent."""

from __future__ import annotations

from typing import NamedTuple

from asyncrpc.core.ids import RRefId


class ReferenceSeen(NamedTuple):
    """One reference, as the owner of its value or a holder sees it.

    Attributes:
        owner: name of the worker that has the value.
        creator: name of the worker that made the reference.
        state: as in `RRefRecord`.
        type_name: of the value; empty while it is being made, and from a holder.
        holders: names of the workers that hold it, if the owner tells this.
        handles: Python objects that refer to it.
        lent: messages and borrowers that rely on it.
        age_s: seconds since the worker first had it.
    """

    rref_id: RRefId
    owner: str
    creator: str
    is_owner: bool
    state: str
    type_name: str
    holders: list[str]
    handles: int
    lent: int
    age_s: float


class ReferencesSeen(NamedTuple):
    """The references of one worker.

    Attributes:
        references: the oldest.
    """

    references: list[ReferenceSeen]
    left_out: int
