"""The owner's side: which values it has, and which workers hold them.

An entry may exist before its value: a creator sends its remote() to the owner and lends
the RRef to a third worker, and the two messages race.  Such an entry is UNBORN:
questions about it wait.  It is born by its remote(), or given up when the creator dies
or says that no remote() will come.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

from asyncrpc.core.ids import Incarnation, RRefId
from asyncrpc.core.rref.machine.effects import (
    Effect,
    Freed,
    NotWanted,
    SendGone,
    SendProbe,
    SendRegistered,
    ValueGone,
)
from asyncrpc.core.rref.machine.index import Index, Tombstones
from asyncrpc.errors import (
    LocalProtocolError,
    RemoteProtocolError,
    RRefDeletedError,
)


class EntryState(enum.Enum):
    UNBORN = "unborn"  # a worker mentioned it before the remote() that makes it
    LIVE = "live"
    GONE = "gone"  # freed before, or never to be made; kept while pinned here


UNBORN, LIVE, GONE = EntryState


@dataclass(slots=True)
class _OwnedValue:
    state: EntryState
    holders: dict[Incarnation, int] = field(default_factory=dict)  # forks handed to it
    waiting: list[Incarnation] = field(default_factory=list)  # registered before birth
    local: int = 0  # the owner's own handles
    pins: int = 0  # messages and calls here that are about it

    @property
    def is_wanted(self) -> bool:
        return bool(self.holders or self.waiting or self.local or self.pins)


class OwnerTable:
    """The values of this worker, and the workers that hold them.

    Thread safety: none; all calls on the worker's loop.
    """

    def __init__(self, me: Incarnation, entries_max: int = sys.maxsize) -> None:
        self._me = me
        self._entries_max = entries_max
        self._entries: dict[RRefId, _OwnedValue] = {}
        self._held_by: Index[Incarnation, RRefId] = Index()
        self._unborn_of: Index[Incarnation, RRefId] = Index()
        self._dead = Tombstones()

    def __len__(self) -> int:
        return len(self._entries)

    def state(self, rref_id: RRefId) -> EntryState:
        """Return whether to use the value, wait for it, or fail.

        An RRef that is not in the table is GONE: `pin` it first if it may be unborn.
        """
        entry = self._entries.get(rref_id)
        return GONE if entry is None else entry.state

    def __iter__(self) -> Iterator[RRefId]:
        return iter(tuple(self._entries))

    def local(self, rref_id: RRefId) -> int:
        """Return how many handles of its own the owner has."""
        entry = self._entries.get(rref_id)
        return 0 if entry is None else entry.local

    def holders(self, rref_id: RRefId) -> dict[Incarnation, int]:
        """Return the holders of an RRef and how many forks each was given."""
        entry = self._entries.get(rref_id)
        return {} if entry is None else dict(entry.holders)

    def kept_for(self, worker: Incarnation) -> int:
        """Return how many entries a worker holds, waits for, or was to make."""
        return self._held_by.count(worker) + self._unborn_of.count(worker)

    def create(
        self, rref_id: RRefId, for_holder: Incarnation | None = None
    ) -> list[Effect]:
        """Add a value: of a remote() by `for_holder`, or of a handle made here.

        Others may have mentioned the id before, and been told that it is GONE: the word
        of its creator, which makes it now, is the one that counts.
        """
        if for_holder in self._dead:
            return [Freed(rref_id)]
        entry = self._entries.setdefault(rref_id, _OwnedValue(UNBORN))
        if entry.state is LIVE:
            raise RemoteProtocolError(
                f"{rref_id} was made twice; the creator must count its ids"
            )
        entry.state = LIVE
        self._unborn_of.discard(rref_id.creator, rref_id)
        if for_holder is None:
            entry.local += 1
        else:
            self._count(rref_id, entry, for_holder)
        waiting, entry.waiting = entry.waiting, []
        for holder in waiting:
            self._count(rref_id, entry, holder)
        return [SendRegistered(holder, rref_id) for holder in waiting]

    def hand_out(self, rref_id: RRefId, to: Incarnation) -> None:
        """Count a fork that is being sent to `to`."""
        entry = self._entries.get(rref_id)
        if entry is None or entry.state is GONE:
            raise RRefDeletedError(
                f"{rref_id} cannot be sent: its value was freed, or never made"
            )
        if to not in self._dead:
            self._count(rref_id, entry, to)

    def undo_hand_out(self, rref_id: RRefId, to: Incarnation) -> list[Effect]:
        """Take back a `hand_out` whose message was not sent, not even in part."""
        entry = self._entries.get(rref_id)
        if entry is None or to not in entry.holders:
            return []  # `to` has died meanwhile, and with it everything it held
        return self._uncount(rref_id, entry, to, 1)

    def release(self, rref_id: RRefId, from_: Incarnation, forks: int) -> list[Effect]:
        """Take back forks."""
        if from_ in self._dead:
            return []
        entry = self._entries.get(rref_id)
        held = 0 if entry is None else entry.holders.get(from_, 0)
        if entry is None or not 0 < forks <= held:
            raise RemoteProtocolError(
                f"worker {from_:016x} released {forks} forks of {rref_id}"
                f" but holds {held}"
            )
        return self._uncount(rref_id, entry, from_, forks)

    def register(self, rref_id: RRefId, holder: Incarnation) -> list[Effect]:
        """Count a borrower that keeps the RRef.

        Its lender is counted, or still waits for its remote() to be confirmed: so a
        value that is unknown here is still to be made, unless a lender has died.  The
        creator knows; the answer waits for its word or for the remote() itself.
        """
        if holder in self._dead:
            return []
        effects: list[Effect] = []
        entry = self._meet(rref_id, effects)
        if entry.state is LIVE:
            self._count(rref_id, entry, holder)
            effects.append(SendRegistered(holder, rref_id))
        elif entry.state is UNBORN:
            entry.waiting.append(holder)
            self._held_by.add(holder, rref_id)
        else:
            effects.append(SendGone(holder, rref_id))
        return effects + self._collect(rref_id, entry)

    def came_home(self, rref_id: RRefId) -> list[Effect]:
        """Count a handle of the owner's own, for an RRef that came back to it.

        The loan that brought it can go back at once.  Never fails, like `pin`.
        """
        effects: list[Effect] = []
        entry = self._meet(rref_id, effects)
        entry.local += 1
        if entry.state is GONE:
            effects.append(ValueGone(rref_id))
        return effects

    def pin(self, rref_id: RRefId) -> list[Effect]:
        """Keep the RRef while a message or a call here is about it.

        Never fails: with `ValueGone` among the effects, what is pinned is the knowledge
        that there is no value.  Each pin needs an `unpin`.
        """
        effects: list[Effect] = []
        entry = self._meet(rref_id, effects)
        entry.pins += 1
        if entry.state is GONE:
            effects.append(ValueGone(rref_id))
        return effects

    def unpin(self, rref_id: RRefId) -> list[Effect]:
        """Undo one `pin`."""
        entry = self._used(rref_id, "pins")
        entry.pins -= 1
        return self._collect(rref_id, entry)

    def local_acquire(self, rref_id: RRefId) -> None:
        """Count a handle of the owner's own; the RRef must be pinned or held here."""
        entry = self._entries.get(rref_id)
        if entry is None or not (entry.pins or entry.local):
            raise LocalProtocolError(f"{rref_id} is not pinned: pin it before use")
        entry.local += 1

    def local_release(self, rref_id: RRefId) -> list[Effect]:
        """Undo one `local_acquire`, or the handle that came with `create`."""
        entry = self._used(rref_id, "local")
        entry.local -= 1
        return self._collect(rref_id, entry)

    def settled(self, rref_id: RRefId, from_: Incarnation) -> list[Effect]:
        """Hear from the creator that no remote() for this id is under way."""
        if from_ != rref_id.creator:
            raise RemoteProtocolError(f"worker {from_:016x} did not make {rref_id}")
        entry = self._entries.get(rref_id)
        if entry is None or entry.state is not UNBORN:
            return []  # it was on its way when we asked
        return self._give_up(rref_id, entry)

    def worker_lost(
        self, incarnation: Incarnation, at_most: int = sys.maxsize
    ) -> list[Effect]:
        """Drop what a dead worker held or was to make, in time proportional to that.

        Args:
            at_most: of either; the rest, see `kept_for`, is dropped by further calls.
        """
        self._dead.add(incarnation)
        effects: list[Effect] = []
        for rref_id in self._held_by.pop(incarnation, at_most):
            entry = self._entries[rref_id]
            entry.holders.pop(incarnation, None)
            entry.waiting = [
                waiter for waiter in entry.waiting if waiter != incarnation
            ]
            effects += self._collect(rref_id, entry)
        for rref_id in self._unborn_of.pop(incarnation, at_most):
            effects += self._give_up(rref_id, self._entries[rref_id])
        return effects

    def is_lost(self, incarnation: Incarnation) -> bool:
        """Return whether a worker was lost and has not come back."""
        return incarnation in self._dead

    def forgive(self, incarnation: Incarnation) -> None:
        """Begin anew with a worker that was declared lost, and lives.

        It holds nothing: what it held went with `worker_lost`.  Nothing of the time
        before may be fed to this table any more.
        """
        self._dead.discard(incarnation)

    def _meet(self, rref_id: RRefId, effects: list[Effect]) -> _OwnedValue:
        """Find the entry, or make one for an RRef that is not here (yet)."""
        entry = self._entries.get(rref_id)
        if entry is not None:
            return entry
        creator = rref_id.creator
        is_full = len(self._entries) >= self._entries_max
        if creator == self._me or creator in self._dead or is_full:
            entry = _OwnedValue(GONE)
        else:
            entry = _OwnedValue(UNBORN)
            self._unborn_of.add(creator, rref_id)
            effects.append(SendProbe(creator, rref_id))
        self._entries[rref_id] = entry
        return entry

    def _used(self, rref_id: RRefId, count: str) -> _OwnedValue:
        entry = self._entries.get(rref_id)
        if entry is None or not getattr(entry, count):
            raise LocalProtocolError(f"{rref_id} has no {count} here to give back")
        return entry

    def _count(self, rref_id: RRefId, entry: _OwnedValue, holder: Incarnation) -> None:
        entry.holders[holder] = entry.holders.get(holder, 0) + 1
        self._held_by.add(holder, rref_id)

    def _uncount(
        self, rref_id: RRefId, entry: _OwnedValue, holder: Incarnation, forks: int
    ) -> list[Effect]:
        entry.holders[holder] -= forks
        if not entry.holders[holder]:
            del entry.holders[holder]
            if holder not in entry.waiting:
                self._held_by.discard(holder, rref_id)
        return self._collect(rref_id, entry)

    def _give_up(self, rref_id: RRefId, entry: _OwnedValue) -> list[Effect]:
        """Tell the waiting workers that the value will never be made."""
        entry.state = GONE
        self._unborn_of.discard(rref_id.creator, rref_id)
        effects: list[Effect] = [SendGone(to, rref_id) for to in entry.waiting]
        for holder in entry.waiting:
            if holder not in entry.holders:
                self._held_by.discard(holder, rref_id)
        entry.waiting = []
        if entry.pins or entry.local:
            effects.append(ValueGone(rref_id))
        return effects + self._collect(rref_id, entry)

    def _collect(self, rref_id: RRefId, entry: _OwnedValue) -> list[Effect]:
        if entry.is_wanted:
            return []
        del self._entries[rref_id]
        self._unborn_of.discard(rref_id.creator, rref_id)
        if entry.state is GONE:
            return []
        return [Freed(rref_id) if entry.state is LIVE else NotWanted(rref_id)]
