"""A worker's report of its references: one record for each, to find leaks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice

from asyncrpc.core.ids import RRefId
from asyncrpc.core.rref.names import PeerNames
from asyncrpc.core.rref.shared import SharedById
from asyncrpc.core.rref.tables import Tables
from asyncrpc.core.rref.values import Value, Values


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
        type_name: of the value, or of the exception that was raised instead, on the
            owner; empty while it is being made, and elsewhere.
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


class Records:
    """Describes the references of one worker; on its loop."""

    def __init__(
        self,
        name: str,
        tables: Tables,
        values: Values,
        shared: SharedById,
        names: PeerNames,
        *,
        now_s: Callable[[], float],
    ) -> None:
        self._name = name
        self._owner, self._user = tables.owner, tables.user
        self._values = values
        self._shared = shared
        self._names = names
        self._now_s = now_s

    def counts(self) -> dict[str, int]:
        """Return how many values are owned and held here, for leak checks."""
        return {
            "owned": len(self._owner),
            "held": len(self._user),
            "values": len(self._values),
        }

    def oldest(self, count: int | None = None) -> list[RRefRecord]:
        """Describe the references that this worker owns or holds, oldest first.

        Args:
            count: how many of each at most; None: all.
        """
        records = [self._owned(rref_id) for rref_id in islice(self._owner, count)]
        records += [self._held(rref_id) for rref_id in islice(self._user, count)]
        return sorted(records, key=lambda record: (-record.age_s, record.rref_id))

    def _owned(self, rref_id: RRefId) -> RRefRecord:
        future = self._values.get(rref_id)
        return RRefRecord(
            rref_id=rref_id,
            owner=self._name,
            creator=self._names.shown(rref_id.creator),
            is_owner=True,
            state=self._owner.state(rref_id).value,
            type_name=_type_name(future),
            holders=self.holders(rref_id),
            handles=self._owner.local(rref_id),
            lent=0,
            age_s=self._now_s() - getattr(future, "made_s", 0.0),
        )

    def _held(self, rref_id: RRefId) -> RRefRecord:
        holding = self._user.get(rref_id)
        assert holding is not None  # the loop has not turned since it was listed
        shared = self._shared.get(rref_id)
        return RRefRecord(
            rref_id=rref_id,
            owner=self._names.shown(holding.owner),
            creator=self._names.shown(rref_id.creator),
            is_owner=False,
            state=holding.state.value,
            type_name="",
            holders={},
            handles=holding.handles,
            lent=holding.pins,
            age_s=self._now_s() - shared.made_s if shared is not None else 0.0,
        )

    def holders(self, rref_id: RRefId) -> dict[str, int]:
        """Return the holders of a value of this worker, by name, with their forks."""
        held = self._owner.holders(rref_id)
        return {self._names.shown(holder): forks for holder, forks in held.items()}


def _type_name(value: Value | None) -> str:
    if value is None or not value.done():
        return ""
    return type(value.exception() or value.result()).__qualname__
