"""What the workers of one run leave at a store for workers that come back.

The name of the run, so that no worker takes another program's store for that of its own
group; the last incarnation of each rank that came; and the offer: some members that
run.  None of it is part of a meeting or an attempt: it stays as long as the store.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

import msgpack

from asyncrpc.core.ids import Incarnation
from asyncrpc.core.loop.clock import Clock
from asyncrpc.core.members import Member, OfferedGroup
from asyncrpc.core.membership.machine.keeping import Finding
from asyncrpc.errors import MalformedError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

REFUSED_S: Final = 1.0  # until an offer whose members did not answer is tried again

_now_s: Final = Clock().now_s


class OfferBoard:
    """The offers of a run, as one worker reads and writes them; in threads."""

    def __init__(self, prefix: str, run: str, rank: int) -> None:
        self.run = run
        self._run_key = f"{prefix}/run"
        self._life_key = f"{prefix}/life/{rank}"
        self._offer_key = f"{prefix}/offer"
        self._refused = b""
        self._refused_until_s = 0.0
        self._read = b""

    def arrive(self, store: Store, member: Member) -> None:
        """Leave the name of the run, if no other worker has, and this incarnation."""
        store.compare_set(self._run_key, "", self.run)
        if self._is_ours(store):
            store.set(self._life_key, str(member.incarnation))

    def look(self, store: Store) -> Finding:
        """Return what is there."""
        run = _get(store, self._run_key).decode()
        holder = Incarnation(int(_get(store, self._life_key) or b"0"))
        try:
            offered = _members(_get(store, self._offer_key))
        except MalformedError:  # it is replaced
            offered = ()
        return Finding(run, holder, tuple(member.incarnation for member in offered))

    def write(self, store: Store, members: Iterable[Member]) -> None:
        """Leave an offer in place of the former one."""
        packed: bytes = msgpack.packb([member.encode() for member in members])
        store.set(self._offer_key, packed)  # type: ignore[arg-type]

    def read(self, store: Store) -> OfferedGroup | None:
        """Return the offer, unless its members were just now found not to answer."""
        if not store.check([self._offer_key]) or not self._is_ours(store):
            return None
        packed = store.get(self._offer_key)
        if packed == self._refused and _now_s() < self._refused_until_s:
            return None
        self._read = packed
        return OfferedGroup(_members(packed))

    def refuse(self) -> None:
        """Take note that no member of the offer that was read last answers."""
        self._refused = self._read
        self._refused_until_s = _now_s() + REFUSED_S

    def _is_ours(self, store: Store) -> bool:
        return _get(store, self._run_key).decode() == self.run


def _get(store: Store, key: str) -> bytes:
    value: bytes = store.get(key) if store.check([key]) else b""
    return value


def _members(packed: bytes) -> Sequence[Member]:
    if not packed:
        return ()
    try:
        return [Member.decode(fields) for fields in msgpack.unpackb(packed)]
    except (TypeError, ValueError) as error:  # msgpack raises these as well
        raise MalformedError(f"the offer at the meeting point: {error}") from error
