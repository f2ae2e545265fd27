"""Membership: which workers are in the group, by what its members tell each other.

`machine.membership` decides what of the news counts.  This service carries the news:

- along the *ring* (`machine.ring`) in a tree, so that a change costs each worker about
  one message, and opens connections to few, always the same, others;
- by *comparing* every few seconds with the successor on the ring, which repairs lost
  news, and notices the death of a worker that no other speaks to.

A worker also looks for lost workers just after it on the ring: so the parts of a group
whose network was cut find each other again.

Nothing of this runs in the first `LivenessOptions.heartbeat_s` seconds, unless
something happens or the program asks for changes: a short program pays nothing.  In a
static group none of this runs.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

from asyncrpc.core.identity import WorkerIdentity
from asyncrpc.core.ids import Incarnation, WorkerId, WorkerInfo
from asyncrpc.core.links.connection import Connection
from asyncrpc.core.links.directory import Directory
from asyncrpc.core.links.link import Link
from asyncrpc.core.members import (
    UNKNOWN_INCARNATION,
    Member,
    Rendezvous,
    Republishing,
    member_of,
)
from asyncrpc.core.membership.changes import MemberChange, MemberChanges
from asyncrpc.core.membership.comparison import Comparison, MembershipTimes
from asyncrpc.core.membership.displacement import Displacement
from asyncrpc.core.membership.doubts import Doubts
from asyncrpc.core.membership.finder import Finder
from asyncrpc.core.membership.gossip import BATCH_S, Gossip
from asyncrpc.core.membership.joining import JoinAdmission, Joiner
from asyncrpc.core.membership.keeper import MeetingPointKeeper
from asyncrpc.core.membership.machine.membership import (
    TOMBSTONE_S,
    TOMBSTONES_MAX,
    Membership,
)
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
    Warn,
)
from asyncrpc.core.membership.machine.ring import place_of
from asyncrpc.core.membership.messages import (
    RECEIVER_ONLY,
    SERVICE,
    AskMembers,
    CompareDigest,
    ExchangeRecords,
    FindMember,
    MemberNews,
    News,
    PingMember,
    read_news,
)
from asyncrpc.core.services.ports import Scheduler
from asyncrpc.core.services.router import answers, takes
from asyncrpc.core.services.schema import refusal
from asyncrpc.core.trace.recorder import FlightRecorder
from asyncrpc.core.wire.frames import Hello
from asyncrpc.errors import AsyncRpcError, ConnectionLostError, MalformedError

logger = logging.getLogger("asyncrpc")

# News wakes a worker that has not begun to compare, but not at once: at the end of a
# program all workers leave, and no member is left to inform.
WAKE_S: Final = 0.5
LAST_DIAL_S: Final = 0.08  # for a worker that leaves without any connection


class MembershipService:
    """One worker's records of its group; a `Service`.

    Attributes:
        comparison: repairs lost news.
        on_life: called with the record of each member that has come, after its former
            life has ended.
        settle, on_unused_lost: see `Doubts`.
    """

    name = SERVICE

    def __init__(
        self,
        identity: WorkerIdentity,
        scheduler: Scheduler,
        peers: Directory,
        times: MembershipTimes,
        *,
        is_static: bool,
        is_draining: Callable[[], bool],
        on_peer_lost: Callable[[WorkerId, str], None],
        recorder: FlightRecorder,
    ) -> None:
        self._identity = identity
        self._scheduler = scheduler
        self._peers = peers
        self._is_static = is_static
        self._on_peer_lost = on_peer_lost
        self._recorder = recorder
        self._is_closed = False
        self.table = Membership(Record(identity.member))
        self._finder = Finder(identity, scheduler, peers, self.take)
        self._joiner = Joiner(identity, scheduler, peers)
        self.gossip = Gossip(scheduler, peers, self._wake)
        self.comparison = Comparison(
            identity, scheduler, peers, times, table=self.table, records=self
        )
        self._doubts = Doubts(
            identity,
            scheduler,
            peers,
            times,
            table=lambda: self.table,
            answers=self._joiner.is_there,
            compare=self.comparison.compare,
            carry_out=self.carry_out,
            end_former=self._end_former,
            on_gone=lambda peer: on_peer_lost(peer, "it does not answer"),
        )
        self.settle = self._doubts.settle
        self.on_unused_lost = self._doubts.on_unused_lost
        self._displacement = Displacement(
            identity,
            scheduler,
            lost_after_s=times.lost_after_s,
            has_taken=self._joiner.is_there,
            outlive=self._outlive,
            holders=lambda: self._finder.holders(self.table, identity.name),
            links=lambda: self._finder.links().values(),
        )
        self.routes = [
            answers(PingMember, self._on_ping),
            answers(AskMembers, self._on_members),
            answers(FindMember, self._on_find),
            answers(CompareDigest, self.comparison.on_sync),
            answers(ExchangeRecords, self.comparison.on_exchange),
            takes(MemberNews, self._on_news),
        ]
        self._admission = JoinAdmission(
            identity,
            scheduler,
            peers,
            table=self.table,
            times=times,
            ask=self._joiner.ask,
            is_draining=is_draining,
            carry_out=self.carry_out,
        )
        self._keeper = MeetingPointKeeper(identity, scheduler)
        self._changes: list[weakref.ref[MemberChanges]] = []
        self._guests_lost_s: dict[str, float] = {}
        self.on_life: Callable[[Record], None] | None = None
        self._begins_alone, self._came_late = True, False

    # --- life ------------------------------------------------------------------------

    async def enter(self, rendezvous: Rendezvous, timeout_s: float) -> None:
        """Meet the others, or join a running group."""
        identity, now_s = self._identity, self._scheduler.loop.time
        me = Record(identity.member)
        table = self.table = Membership(me, is_static=self._is_static)
        self._admission.begin(table)
        self.comparison.begin(table)
        members, records = await self._joiner.meet(rendezvous, timeout_s)
        self._came_late = records is not None
        if records is not None:
            table.begin(records or [Record(identity.member, 1)], now_s())
            identity.rank = table.me.member.rank
            for record in table.records:
                self._note_life(record)
            if isinstance(rendezvous, Republishing):
                await rendezvous.publish(identity.member)
        else:
            table.begin(map(_first_life, members), now_s())
            self._begins_alone = not _is_list(members)
        self.gossip.begin(table)
        # Includes workers in a list, of which only the addresses are known.
        listed = members if records is None else []
        self._peers.add(listed or [record.member for record in table.records])
        self._keeper.begin(rendezvous, table)

    def start(self) -> None:
        """Begin to compare, after a heartbeat."""
        if self._begins_alone and len(self.table) > 1:
            self.comparison.activate()

    async def close(self) -> None:
        """Tell the others that this worker leaves; end the iterators."""
        self._is_closed = True
        self._keeper.close()
        self.gossip.close()
        self.comparison.close()
        self._doubts.close()
        for changes in self._iterators():
            changes.end()
        await self._announce_leave()

    async def _announce_leave(self) -> None:
        """Inform connected members; one of them informs the others."""
        heir = self.table.successor
        record = self.table.leave(self._scheduler.loop.time())
        links = self._finder.links()
        if not links and heir and self.comparison.has_begun:
            links = await self._link_in_haste(heir)
        heir = heir if heir in links else next(iter(links), "")
        for name, link in links.items():
            limit = place_of(name) if name == heir else RECEIVER_ONLY
            link.tell(MemberNews([News(limit, record)]))

    async def _link_in_haste(self, name: str) -> dict[str, Link]:
        """Connect to a member that can tell the others, if that takes no time."""
        try:
            async with asyncio.timeout(LAST_DIAL_S):
                return {name: await self._peers.open_link(name)}
        except (AsyncRpcError, TimeoutError):
            return {}

    # --- what programs ask -----------------------------------------------------------

    @property
    def known(self) -> list[WorkerInfo]:
        """Every member that is there, as far as is known; this one included."""
        return [
            WorkerInfo(record.name, record.member.rank) for record in self.table.records
        ]

    async def find(self, name: str, timeout_s: float) -> None:
        """Ask others about a worker that this one does not know."""
        await self._finder.find(self.table, name, timeout_s)

    def changes(self) -> MemberChanges:
        """Return the changes from now on."""
        changes = MemberChanges(self._scheduler.loop)
        if self._is_closed:
            changes.end()
        else:
            self._changes = [ref for ref in self._changes if ref() is not None]
            self._changes.append(weakref.ref(changes))
            self.comparison.activate()
        return changes

    # --- what the directory asks and tells -------------------------------------------

    def refusal(self, hello: Hello) -> str:
        """Return why a peer that introduces itself is refused; empty if it is not."""
        if self._displacement.has_happened:
            return "another worker has its name now"
        return self.table.refusal(hello.name, Incarnation(hello.incarnation))

    async def refresh(self, name: str) -> bool:
        """Ask connected members whether a worker has moved."""
        if self._is_closed:
            return False
        return await self._finder.refresh(self.table, name)

    @property
    def gateway(self) -> str:
        """The member that this worker joined by as a guest; empty if it is none."""
        return self.table.me.member.gateway

    def is_claimed(self, hello: Hello) -> bool:
        """Return whether another worker may have the name or rank of a peer."""
        return self._admission.is_claimed(member_of(hello))

    async def claim(self, hello: Hello) -> str:
        """Return why a peer may not have its name and rank; empty if it may."""
        return await self._admission.contest(member_of(hello))

    def introduce_guest(self, hello: Hello) -> Hello:
        """Return the HELLO of a guest with its rank in the group."""
        known = self.table.get(hello.name)
        if known is None or known.incarnation != hello.incarnation:
            return hello
        return replace(hello, rank=known.member.rank)

    def take_in(self, connection: Connection, hello: Hello) -> None:
        """Answer a worker that asks to be admitted."""
        self._admission.take_in(connection, hello)

    def on_link(self, link: Link) -> None:
        """Take a link that was opened; messages that this causes are sent later."""
        hello = link.connection.peer
        if hello is None or link.peer.name == self._identity.name:
            return
        member = member_of(hello)
        known = self.table.get(member.name)
        if known is not None and known.incarnation == member.incarnation:
            self._doubts.discard(member.name)
            former = self.table.confirm(member.name)
            if former != UNKNOWN_INCARNATION:
                self._end_former(WorkerId(member.name, former))
        effects = self.table.meet(member, self._scheduler.loop.time())
        if effects:
            self._scheduler.loop.call_soon(self.carry_out, effects, link)

    # --- what other workers say ------------------------------------------------------

    def _on_news(self, link: Link, message: MemberNews) -> None:
        """Take news; a wrong record does not affect the others."""
        problem: MalformedError | None = None
        for item in message.items:
            try:
                news = read_news(item)
            except MalformedError as error:
                problem = problem or error
            else:
                self.take(news.record, news.limit, link)
        if problem is not None:
            raise refusal(link.peer.name, MemberNews.name, problem)

    async def _on_ping(self, link: Link, _: PingMember) -> None:
        """Say that this worker is there."""

    async def _on_members(self, link: Link, _: AskMembers) -> list[Record]:
        self.gossip.on_ready(link.peer.name)
        return self.table.welcome

    async def _on_find(self, _: Link, request: FindMember) -> Record | None:
        return self.table.get(request.member)

    def _doubt_names_from(self, teller: Incarnation) -> None:
        """Ask the workers that only one said there were, which is gone."""
        for name in self.table.hearsay.names_from(teller):
            record = self.table.get(name)
            if record is not None and record.is_alive:
                self._doubts.add(record.member)

    def on_peer_lost(self, peer: WorkerId, reason: str) -> None:
        """Tell the others of a loss, unless they know better."""
        now_s = self._scheduler.loop.time()
        if self._is_closed:
            return
        self._doubt_names_from(peer.incarnation)
        known = self.table.get(peer.name)
        if known is None:
            self._guests_lost_s[peer.name] = now_s
        elif known.is_placed and known.incarnation != peer.incarnation:
            # The peer had said that it was this worker, and was not, or is no longer.
            self._note_in_directory(known, peer.incarnation)
        self.carry_out(self.table.lose(peer.name, peer.incarnation, now_s))
        self.forget_old(now_s)

    def take(
        self, record: Record, limit: int, link: Link, *, is_repair: bool = False
    ) -> None:
        """Take one record that arrived over a link."""
        table = self.table
        if self._is_closed:
            return
        before = table.get(record.name)
        is_own = link.peer == WorkerId(record.name, record.incarnation)
        is_guest = self._is_guest(link)
        heard = table.receive(
            record,
            self._scheduler.loop.time(),
            by=link.peer,
            is_guest=is_guest,
            is_linked=before is not None and self._is_linked(before, record),
        )
        self.carry_out(heard, link)
        known = table.get(record.name)
        if known is None or known.order != record.order:
            return
        if limit != RECEIVER_ONLY:
            self.gossip.pass_on(known, limit)
        elif before is not known and (is_repair or (is_own and is_guest)):
            self.gossip.announce(known)

    def _on_ended(self, record: Record) -> None:
        """Doubt whom only this worker has told of, and lose its guests.

        All members find that out by themselves, so nobody need be told.
        """
        self._doubt_names_from(record.incarnation)
        now_s = self._scheduler.loop.time()
        for name in self.table.guests_of(record.name):
            guest = self.table.get(name)
            if guest is not None:
                lost = self.table.lose(name, guest.incarnation, now_s)
                self.carry_out(effect for effect in lost if isinstance(effect, Changed))

    def _is_linked(self, known: Record, record: Record) -> bool:
        """Return whether a link speaks for the known life, against a record.

        A broken one does not speak against a later life of the name, nor any if there
        is a link to that, too: it was let in.
        """
        link = self._peers.link_of(known.incarnation)
        if link is None or record.incarnation == known.incarnation:
            return link is not None
        is_met = self._peers.link_of(record.incarnation) is not None
        return not (link.connection.is_broken or is_met)

    def _is_guest(self, link: Link) -> bool:
        """Return whether a peer may speak only of itself."""
        record = self.table.get(link.peer.name)
        return link.is_guest or (record is not None and bool(record.member.gateway))

    # --- what the machine decides ----------------------------------------------------

    def carry_out(self, effects: Iterable[Effect], link: Link | None = None) -> None:
        for effect in effects:
            match effect:
                case Changed():
                    self._on_changed(effect)
                case Announce(record):
                    self.gossip.announce_when_ready(record)
                case Reply(record):
                    _tell(link, record)
                case Warn(record):
                    _tell(self._peers.link_of(record.incarnation), record)
                case Forgotten(name):
                    self._peers.forget(name)
                case _ if not self._is_closed:
                    self._find_out(effect)

    def _find_out(self, effect: Effect) -> None:
        """Find out which lives there are."""
        match effect:
            case Contest(record):
                self._displacement.contest(record)
            case Doubt(member):
                self._doubts.add(member)
            case Settle(present, later):
                self._doubts.contest(present, later)

    def _on_changed(self, change: Changed) -> None:
        record, kind = change.record, change.kind
        name = record.name
        is_other = change.previous not in (UNKNOWN_INCARNATION, record.incarnation)
        if is_other and not change.is_doubted:
            self._end_former(WorkerId(name, change.previous))
        if not record.is_alive:
            self._on_ended(record)
        self._admission.on_changed()
        if (ranked := self.table.holder_of(record.member.rank)) is not None:
            self._peers.give_rank(ranked.member.rank, ranked.name)
        if record.is_alive:
            self._note_in_directory(record, change.previous)
            self._note_life(record)
        if kind is ChangeKind.LEFT:
            link = self._peers.link_of(record.incarnation)
            if link is None:
                self._on_peer_lost(WorkerId(name, record.incarnation), "it has left")
            elif link.connection.is_broken:  # it will not be resumed
                link.connection.end(ConnectionLostError("it has left"))
        self._keeper.on_change(kind)
        if kind is not None:
            info = WorkerInfo(name, record.member.rank)
            member, recorder = WorkerId(name, record.incarnation), self._recorder
            recorder.membership.record((recorder.now_s(), member, kind.value))
            is_restart = kind is ChangeKind.RESTARTED
            previous = change.previous if is_restart else UNKNOWN_INCARNATION
            for changes in self._iterators():
                changes.put(MemberChange(kind, info, record.incarnation, previous))

    def _note_life(self, record: Record) -> None:
        if self.on_life is not None:
            self.on_life(record)

    def _end_former(self, former: WorkerId) -> None:
        """End all that concerned the former life of a restarted worker."""
        link = self._peers.link_of(former.incarnation)
        if link is not None:
            link.connection.end(ConnectionLostError("the worker has been restarted"))
        else:
            self._on_peer_lost(former, "it has been restarted")

    def _note_in_directory(self, record: Record, previous: int) -> None:
        """Direct calls to where the worker is now."""
        known = self._peers.known_incarnation(record.name)
        if known in (None, UNKNOWN_INCARNATION, previous, record.incarnation):
            self._peers.add([record.member])

    def on_succeeded(self, by: str, now_s: float) -> None:
        """Record that a member takes this worker for a former life of its name."""
        self._displacement.on_succeeded(by, now_s)

    def on_accepted(self) -> None:
        """Record that a member accepts this worker's identity."""
        self._displacement.on_accepted()

    def _outlive(self, record: Record) -> None:
        self.carry_out(self.table.outlive(record))

    def _iterators(self) -> list[MemberChanges]:
        iterators = (ref() for ref in self._changes)
        return [iterator for iterator in iterators if iterator is not None]

    def _wake(self) -> float:
        """Compare from now on, since there is news; return how long the news waits."""
        # A group that was joined has run for a while: others wait for what this worker
        # passes on, and each worker that waits adds to the delay.
        is_awake = self.comparison.has_begun or self._came_late
        wait_s = BATCH_S if is_awake else WAKE_S
        self.comparison.activate()
        return wait_s

    def forget_old(self, now_s: float) -> None:
        """Forget workers that died long ago."""
        gone = self.table.forget(now_s)
        for name, lost_s in list(self._guests_lost_s.items()):
            is_over = len(self._guests_lost_s) > TOMBSTONES_MAX
            if lost_s + TOMBSTONE_S > now_s and not is_over:
                break
            del self._guests_lost_s[name]
            if self.table.get(name) is None:
                gone.append(name)
        for name in gone:
            self._peers.forget(name)


def _tell(link: Link | None, record: Record) -> None:
    if link is not None and not link.is_lost:
        link.tell(MemberNews([News(RECEIVER_ONLY, record)]))


def _first_life(member: Member) -> Record:
    """Return the record of a worker that was there when the group began."""
    is_listed = member.incarnation == UNKNOWN_INCARNATION
    return Record(member, generation=0 if is_listed else 1)


def _is_list(members: Iterable[Member]) -> bool:
    return any(member.incarnation == UNKNOWN_INCARNATION for member in members)
