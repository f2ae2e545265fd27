"""Membership: the group as one worker knows it, and how news changes it.

What is known of a worker is one record.  Of two records of one name the later counts,
whatever order they come in: by *generation* (which life of the name it is), then by
incarnation (two that took the name at once), then by version (which the worker itself
raises), then LEFT before LOST before ALIVE.  So all workers that have received the same
news know the same, however often and in whatever order they received it.

What a worker says of another is a *hint*: only the worker itself knows that it has
left, how often it has refuted its death, or where it listens.  Who has a link to a
worker does not believe that it has ended; it tells that worker, which refutes it by a
higher version, or, if another is said to have its name, by a later generation.  Who has
none believes the hint and asks the life that is said to have ended (`Doubt`).  A guest
speaks only of itself.

Invariants:
    - the record of a name never goes back;
    - an incarnation that has been succeeded is never alive again, unless it says
      itself that it is;
    - while a worker that has a rank is there, no other gets the rank;
    - a worker holds its own record to be alive until it leaves;
    - an event costs O(log n), whatever n is; what is dead is forgotten.

Sans-IO: time is a number of seconds in an event.

Source: the refutation is SWIM's (Das, Gupta, Motivala, 2002), section 4.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from asyncrpc.core.ids import Incarnation, WorkerId
from asyncrpc.core.members import UNKNOWN_INCARNATION, Member
from asyncrpc.core.membership.machine.hearsay import Hearsay
from asyncrpc.core.membership.machine.records import (
    Announce,
    Changed,
    ChangeKind,
    Contest,
    Doubt,
    Effect,
    Forgotten,
    Record,
    Reply,
    Settle,
    Status,
    Warn,
)
from asyncrpc.core.membership.machine.ring import BITS, CIRCLE, Ring, place_of

MEMBERS_MAX: Final = 65_536  # names, dead ones included; no more are admitted
TOMBSTONES_MAX: Final = 4_096  # records of the dead; then the oldest is forgotten
# A worker that hears nothing of the group for so long may bring back a dead one.
TOMBSTONE_S: Final = 600.0
SUCCEEDED: Final = "a later worker has the name"
FAR_TURNS: Final = 8  # rounds, in one of which a member far away is looked for
# How far one hint may raise a number that only the worker itself raises, by one.
STEP_MAX: Final = 1 << 16
BUCKETS: Final = 64  # parts of the circle that are compared on their own
_SHIFT: Final = BITS - 6
_MIX: Final = 0x9E3779B97F4A7C15  # odd, its bits well mixed: 2^64 / golden ratio


class Membership:
    """The records that one worker has, its own included.

    Attributes:
        alive: the workers that are there, this one included.
        carriers: those of them that pass news on: all but guests.
        lost: the workers that were lost, and may come back.
        hearsay: the workers that only others know.
        is_static: whether the set of names is fixed.
    """

    def __init__(self, me: Record, *, is_static: bool = False) -> None:
        self.me = me
        self.alive = Ring()
        self.carriers = Ring()
        self.lost = Ring()
        self.hearsay = Hearsay()
        self.is_static = is_static
        self._records: dict[str, Record] = {}
        self._died_s: dict[str, float] = {}  # the dead, the first to die first
        self._succeeded: dict[Incarnation, str] = {}
        self._former: dict[str, Incarnation] = {}  # succeeded by hearsay alone
        self._by_rank: dict[int, str] = {}
        self._by_life: dict[Incarnation, str] = {}
        self._guests: dict[str, dict[str, None]] = {}  # by their gateways
        self._digests = [0] * BUCKETS
        self._set(me, 0.0)

    # --- what is known ---------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._records)

    def get(self, name: str) -> Record | None:
        """Return what is known of a name."""
        return self._records.get(name)

    @property
    def records(self) -> list[Record]:
        """Return the records of all workers that are there, by rank and name."""
        alive = [record for record in self._records.values() if record.is_alive]
        return sorted(alive, key=lambda record: (record.member.rank, record.name))

    @property
    def welcome(self) -> list[Record]:
        """Return records for a joining worker: members, and those that may be back."""
        known = self._records.values()
        return [record for record in known if record.status is not Status.LEFT]

    def holder_of(self, rank: int) -> Record | None:
        """Return the worker with a rank, dead or alive; None if no worker has it."""
        known = self._records.get(self._by_rank.get(rank, ""))
        if rank < 0:
            return None
        if known is not None and known.is_alive and known.member.rank == rank:
            return known
        held = [
            record for record in self._records.values() if record.member.rank == rank
        ]
        holder = next(
            (record for record in held if record.is_alive), next(iter(held), None)
        )
        if holder is not None:
            self._by_rank[rank] = holder.name
        return holder

    def owner_of(self, incarnation: Incarnation) -> str:
        """Return the name of a life, as it was first told; empty if it is not known."""
        return self._by_life.get(incarnation, "")

    def guests_of(self, gateway: str) -> list[str]:
        """Return the guests that are there and have joined by a member."""
        return list(self._guests.get(gateway, ()))

    def refusal(self, name: str, incarnation: Incarnation) -> str:
        """Return why a worker that connects is refused; empty if it is not."""
        if (owner := self.owner_of(incarnation)) not in ("", name):
            return f"its incarnation is that of worker {owner!r}"
        if incarnation in self._succeeded:
            return f"{SUCCEEDED} {name!r}"
        if self.is_static and name not in self._records:
            return (
                f"the group is static and has no worker {name!r} "
                '(Options(membership="static"))'
            )
        return ""

    # --- events ----------------------------------------------------------------------

    def begin(self, records: Iterable[Record], now_s: float) -> None:
        """Take over the records of the start."""
        for record in records:
            if record.name != self.me.name or record.incarnation == self.me.incarnation:
                self._enter(record, now_s)
        known = self._records.values()
        placed = [record for record in known if record.is_placed]
        self.alive.update(record.name for record in placed)
        self.carriers.update(
            record.name for record in placed if not record.member.gateway
        )
        self.lost.update(
            record.name for record in known if record.status is Status.LOST
        )

    def receive(
        self,
        record: Record,
        now_s: float,
        *,
        by: WorkerId | None = None,
        is_guest: bool = False,
        is_linked: bool = False,
    ) -> list[Effect]:
        """Take a record from another worker."""
        is_own = by == WorkerId(record.name, record.incarnation)
        known = self._records.get(record.name)
        # The numbers of lives are random: one is of one worker.
        is_of_another = self.owner_of(record.incarnation) not in ("", record.name)
        is_refused = is_guest and (known is None or not is_own)
        if is_refused or (is_of_another and record.name != self.me.name):
            return [] if is_refused or is_own else _denied_by(known, record)
        if record.name == self.me.name:
            return self._on_own_record(record)
        if known is None:
            teller = UNKNOWN_INCARNATION if by is None else by.incarnation
            return self._on_newcomer(record, teller, now_s, is_own=is_own)
        is_absurd = is_own and not _is_near(known, record)
        if record.order <= known.order and not is_absurd:
            return [Reply(known)] if record.order < known.order else []
        if is_own:
            if self._former.get(record.name) == record.incarnation:
                del self._former[record.name]  # it has not ended
            record = self._as_it_may_say(known, record, is_guest=is_guest)
            return self._take(known, record, now_s)
        return self._on_hint(known, record, now_s, is_linked=is_linked)

    def _on_hint(
        self, known: Record, record: Record, now_s: float, *, is_linked: bool
    ) -> list[Effect]:
        """Take what a worker says of another, and what is new of it."""
        is_same = record.incarnation == known.incarnation
        is_end = known.is_placed and not (is_same and record.is_alive)
        record = _nearest(record, known)
        if is_linked and is_end:
            return [Warn(record)] if is_same else [Settle(known, record)]
        if is_same:  # where it listens, and its rank, are for itself to say
            record = replace(record, member=known.member)
        if not is_end:
            return self._take(known, record, now_s)
        if not is_same:
            self._former.setdefault(record.name, known.incarnation)
        record = self._without_taken_rank(record)
        (change,) = self._take(known, record, now_s, is_doubted=not is_same)
        return [change, Doubt(known.member)]

    def _as_it_may_say(
        self, known: Record, record: Record, *, is_guest: bool
    ) -> Record:
        """Return what a worker says of itself, without what it may not say."""
        if is_guest:  # where it is reached, and its rank, are for its gateway to say
            return replace(record, member=known.member)
        return self._without_taken_rank(record)

    def _without_taken_rank(self, record: Record) -> Record:
        holder = self.holder_of(record.member.rank)
        if holder is None or holder.name == record.name or not holder.is_alive:
            return record
        known = self._records.get(record.name)
        rank = -1 if known is None else known.member.rank
        rank = -1 if rank == record.member.rank else rank
        return replace(record, member=replace(record.member, rank=rank))

    def _take(
        self, known: Record, record: Record, now_s: float, *, is_doubted: bool = False
    ) -> list[Effect]:
        self._set(record, now_s, is_doubted=is_doubted)
        kind = _kind_of(known, record)
        return [Changed(kind, record, known.incarnation, is_doubted)]

    def lose(self, name: str, incarnation: int, now_s: float) -> list[Effect]:
        """Record that this worker has given up another; inform all members."""
        known = self._records.get(name)
        if known is None or known.incarnation != incarnation or not known.is_alive:
            return []
        record = replace(known, status=Status.LOST)
        self._set(record, now_s)
        return [
            Changed(ChangeKind.LOST, record, known.incarnation),
            Announce(record),
        ]

    def leave(self, now_s: float) -> Record:
        """Leave the group; return the record for the others."""
        self._set(replace(self.me, status=Status.LEFT), now_s)
        return self.me

    def meet(self, member: Member, now_s: float) -> list[Effect]:
        """Take the peer of a new link: it is alive, and is what it says."""
        known = self._records.get(member.name)
        if known is None:  # it has just joined, or takes no part
            return []
        if known.incarnation == member.incarnation:
            self.confirm(member.name)
            return [] if known.is_alive else [Reply(known)]
        if known.incarnation == UNKNOWN_INCARNATION:
            record = Record(member, generation=known.generation + 1)
            self._set(record, now_s)
            kind = _kind_of(known, record)
            return [Changed(kind, record, UNKNOWN_INCARNATION), Reply(record)]
        if not self.is_static:
            return [Reply(known)]  # a later incarnation will answer that it is one
        record = Record(member, generation=known.generation + 1)
        self._set(record, now_s)
        return [Changed(ChangeKind.RESTARTED, record, known.incarnation)]

    def confirm(self, name: str) -> Incarnation:
        """The present life of a name is the true one; return the one before it.

        That is 0 if others were not the only ones to say so.
        """
        self.hearsay.discard(name)
        former = self._former.pop(name, UNKNOWN_INCARNATION)
        if former != UNKNOWN_INCARNATION:
            self._succeed(former, name)
        return former

    def make_room(self) -> list[Effect]:
        """Make room for a worker that this one has met."""
        return self._make_room(None)

    def _make_room(self, teller: Incarnation | None) -> list[Effect]:
        if len(self._records) < MEMBERS_MAX:
            return []
        name = self.hearsay.oldest_of_the_most(teller)
        if not name:
            return []
        known = self._records[name]
        self._set(replace(known, status=Status.LOST), 0.0)
        self._forget(name)
        return [Forgotten(name)]

    def admit(self, member: Member, now_s: float) -> list[Effect]:
        """Admit a worker, whatever was known of its name.

        The caller has checked that it may join.  A worker that comes back under its
        name keeps its rank, unless it names another.
        """
        known = self._records.get(member.name)
        generation, previous, kind = 1, UNKNOWN_INCARNATION, ChangeKind.JOINED
        if known is not None:
            if known.incarnation == member.incarnation:
                return []
            generation, previous = known.generation + 1, known.incarnation
            if member.rank < 0:
                member = replace(member, rank=known.member.rank)
        record = Record(member, generation)
        if known is not None:
            kind = _kind_of(known, record) or kind
        self._set(record, now_s)
        return [Changed(kind, record, previous), Announce(record)]

    def forget(self, now_s: float) -> list[str]:
        """Forget workers that died long ago; return their names."""
        gone: list[str] = []
        for name, died_s in self._died_s.items():
            is_over = len(self._died_s) - len(gone) > TOMBSTONES_MAX
            if died_s + TOMBSTONE_S > now_s and not is_over:
                break
            gone.append(name)
        for name in gone:
            self._forget(name)
        return gone

    def _forget(self, name: str) -> None:
        record = self._records.pop(name)
        del self._died_s[name]
        self.lost.discard(name)
        self.hearsay.discard(name)
        self._former.pop(name, None)
        if self._by_rank.get(record.member.rank) == name:
            del self._by_rank[record.member.rank]
        self._forget_life(record)

    def _forget_life(self, record: Record) -> None:
        if self.owner_of(record.incarnation) == record.name:
            del self._by_life[record.incarnation]

    # --- comparing -------------------------------------------------------------------

    @property
    def digest(self) -> int:
        """A number that two workers have in common if they know of the same lives."""
        total = 0
        for part in self._digests:
            total ^= part
        return total

    @property
    def digests(self) -> list[int]:
        """The digest of each part of the circle."""
        return list(self._digests)

    def differing(self, digests: Sequence[int]) -> list[int]:
        """Return the parts of the circle where another worker's digests differ."""
        pairs = zip(self._digests, digests, strict=False)
        return [part for part, (ours, theirs) in enumerate(pairs) if ours != theirs]

    def part(self, parts: Iterable[int]) -> list[Record]:
        """Return the records of live workers in some parts of the circle."""
        return [
            self._records[name]
            for part in parts
            for name in self.alive.between(part << _SHIFT, (part + 1) << _SHIFT)
        ]

    def better(self, parts: Iterable[int], theirs: Sequence[Record]) -> list[Record]:
        """Return the records that another worker lacks, or has older.

        A dead worker is among them only if the other believes it to be alive.
        """
        orders = {record.name: record.order for record in theirs}
        newer = [record for record in self.part(parts) if record.name not in orders]
        for name, order in orders.items():
            ours = self._records.get(name)
            if ours is not None and ours.order > order:
                newer.append(ours)
        return newer

    # --- whom to speak to ------------------------------------------------------------

    @property
    def successor(self) -> str:
        """The worker whose death this one must notice; empty if it is alone."""
        return self.carriers.next_to(self.me.name)

    def next_lost(self, turn: int) -> str:
        """Return the lost worker to look for in a round; empty if none was lost.

        It lies between this worker and its successor, so that few workers look for the
        same one.  Now and then it is any other, since the worker that should look for
        it may not know of it.
        """
        lost = self.lost_nearby() if turn % FAR_TURNS else list(self.lost)
        step = turn if turn % FAR_TURNS else turn // FAR_TURNS
        return lost[step % len(lost)] if lost else ""

    def lost_nearby(self) -> list[str]:
        """Return the lost workers between this one and its successor."""
        start, end = place_of(self.me.name), place_of(self.successor or self.me.name)
        nearby: list[str] = []
        name = self.lost.after(start + 1)
        while name and self.lost.within(name, start, end):
            if nearby and name == nearby[0]:
                break
            nearby.append(name)
            name = self.lost.after(place_of(name) + 1)
        return nearby

    # --- the records -----------------------------------------------------------------

    def _on_newcomer(
        self, record: Record, teller: Incarnation, now_s: float, *, is_own: bool
    ) -> list[Effect]:
        has_no_life = record.generation == 0 != record.incarnation
        if self.is_static or has_no_life:
            return []
        if not is_own:
            record = _nearest(record, None)
        effects = self._make_room(teller)
        if not self.hearsay.has_room(teller) or len(self._records) >= MEMBERS_MAX:
            return effects
        record = self._without_taken_rank(record)
        self._set(record, now_s)
        self.hearsay.add(record.name, teller)
        if not record.is_alive:  # remembered, so that older news find it dead
            return effects
        return [*effects, Changed(ChangeKind.JOINED, record, UNKNOWN_INCARNATION)]

    def _on_own_record(self, record: Record) -> list[Effect]:
        me = self.me
        if not _is_near(record, me):
            return [Reply(me)]  # whose own word counts
        if record.incarnation == me.incarnation:
            return self._on_this_life(record)
        if record.incarnation == UNKNOWN_INCARNATION or not me.is_alive:
            return []
        if (record.generation, record.incarnation) < (me.generation, me.incarnation):
            return [Reply(me)]
        # If it was not known, this is the next life.  So it is if the other has left,
        # which the member that admitted this worker did not know.
        if me.generation == 0 or record.status is Status.LEFT:
            return self.outlive(record)
        return [Contest(record)]

    def outlive(self, record: Record) -> list[Effect]:
        """Become a later life than a worker of this name that has ended."""
        if (record.generation, record.incarnation) > (
            self.me.generation,
            self.me.incarnation,
        ):
            generation = record.generation + 1
            self._set(replace(self.me, generation=generation), 0.0)
        return [Reply(self.me), Announce(self.me)]

    def _on_this_life(self, record: Record) -> list[Effect]:
        me = self.me
        if me.is_alive and not record.is_alive and record.version >= me.version:
            generation = max(me.generation, record.generation)
            version = record.version + 1
            self._set(replace(me, generation=generation, version=version), 0.0)
            return [Reply(self.me), Announce(self.me)]
        if record.generation > me.generation:
            self._set(replace(me, generation=record.generation), 0.0)
        return []

    def _set(self, record: Record, now_s: float, *, is_doubted: bool = False) -> None:
        self._enter(record, now_s, is_doubted=is_doubted)
        name, gateway = record.name, record.member.gateway
        for ring, is_on_it in (
            (self.alive, record.is_placed),
            (self.carriers, record.is_placed and not gateway),
        ):
            if is_on_it:
                ring.add(name)
            else:
                ring.discard(name)
        if record.status is Status.LOST:
            self.lost.add(name)
        else:
            self.lost.discard(name)

    def _enter(self, record: Record, now_s: float, *, is_doubted: bool = False) -> None:
        """Put a record in the place of the former one, except on the rings."""
        name = record.name
        part = place_of(name) >> _SHIFT
        known = self._records.get(name)
        if known is not None:
            self._forget_life(known)
            if known.is_placed:
                self._digests[part] ^= _digest_of(known)
            is_other = known.incarnation not in (
                record.incarnation,
                UNKNOWN_INCARNATION,
            )
            if is_other and not is_doubted:
                self._succeed(known.incarnation, name)
            # It was taken for the former of two lives, and has turned out to be the
            # later.
            self._succeeded.pop(record.incarnation, None)
            self._died_s.pop(name, None)
        self._records[name] = record
        if record.is_placed:
            self._digests[part] ^= _digest_of(record)
        self._index(record)
        if not record.is_alive:
            self._died_s[name] = now_s
        if name == self.me.name:
            self.me = record

    def _index(self, record: Record) -> None:
        """Let a record be found by its life, its rank, or its gateway."""
        if record.incarnation != UNKNOWN_INCARNATION:
            self._by_life.setdefault(record.incarnation, record.name)
        rank, gateway = record.member.rank, record.member.gateway
        if rank >= 0 and record.is_alive:
            holder = self._records.get(self._by_rank.get(rank, ""))
            if holder is None or not holder.is_alive or holder.member.rank != rank:
                self._by_rank[rank] = record.name
        if gateway:
            guests = self._guests.setdefault(gateway, {})
            guests.pop(record.name, None)
            if record.is_placed:
                guests[record.name] = None

    def _succeed(self, incarnation: Incarnation, name: str) -> None:
        self._succeeded[incarnation] = name
        if len(self._succeeded) > TOMBSTONES_MAX:
            del self._succeeded[next(iter(self._succeeded))]


def _denied_by(known: Record | None, record: Record) -> list[Effect]:
    """Let a worker itself deny that it has the life of another.

    Whoever believes it refuses the other one, and may have been told alone.
    """
    if known is None or not known.is_placed or record.order < known.order:
        return []
    return [Settle(known, record)]


def _kind_of(known: Record, record: Record) -> ChangeKind | None:
    """Return the change from one record of a member to the next."""
    if not record.is_alive:
        if not known.is_alive:
            return None  # said before
        return ChangeKind.LEFT if record.status is Status.LEFT else ChangeKind.LOST
    if known.incarnation == record.incarnation:
        return None if known.is_alive else ChangeKind.BACK
    if known.incarnation == UNKNOWN_INCARNATION:
        return None if known.is_alive else ChangeKind.BACK
    is_new = known.status is Status.LEFT
    return ChangeKind.JOINED if is_new else ChangeKind.RESTARTED


def _is_near(record: Record, known: Record | None) -> bool:
    """Return whether a hint raises no number by more than workers do themselves."""
    return record == _nearest(record, known)


def _nearest(record: Record, known: Record | None) -> Record:
    """Return what a hint counts for: it raises no number by more than `STEP_MAX`.

    A worker that was lied about often may be further on: hints lead there in steps.
    """
    is_same = known is not None and known.incarnation == record.incarnation
    version = known.version if known is not None and is_same else 0
    generation = 0 if known is None else known.generation
    if record.version - version > STEP_MAX:
        record = replace(record, version=version + STEP_MAX)
    if record.generation - generation > STEP_MAX:
        record = replace(record, generation=generation + STEP_MAX)
    return record


def _digest_of(record: Record) -> int:
    # Incarnations are random already; what is added to one changes all its higher bits.
    total = record.incarnation + record.generation * _MIX + record.version * _MIX * _MIX
    return total * _MIX % CIRCLE
