"""What a worker says of its references: one record for each, to find what leaks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from asyncrpc.ids import RRefId


@dataclass(frozen=True, slots=True)
class RRefRecord:
    """One reference, as one worker sees it.

    Attributes:
        rref_id: of the value; the same on every worker.
        owner: name of the worker that has the value.
        creator: name of the worker that made the reference; an incarnation in
            hexadecimal digits if the name is not known here.
        is_owner: whether this record is the owner's.
        state: on the owner `"live"`, `"unborn"` (heard of before the call that makes
            it) or `"gone"`; elsewhere `"pending"`, `"borrowed"`, `"registering"`,
            `"confirmed"` or `"lost"`: see the RRef protocol.
        type_name: of the value, on its owner; of what was raised instead of it;
            empty while it is being made, and elsewhere.
        holders: on the owner: names of the workers that hold it, and how many forks
            each was given.
        handles: Python objects here that refer to it.
        lent: messages and borrowers that rely on this worker's holding it.
        age_s: seconds since this worker first had it.
    """

    rref_id: RRefId
    owner: str
    creator: str
    is_owner: bool
    state: str
    type_name: str
    holders: Mapping[str, int]
    handles: int
    lent: int
    age_s: float
