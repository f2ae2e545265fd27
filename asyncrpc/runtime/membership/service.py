"""Membership: who is in the group now, told by its members to each other.

`machine.membership` decides what of the news counts.  This service carries the news:

- along the *ring* (`machine.ring`) in a tree, so that a change costs each worker about
  one message, and opens connections to few, always the same, others;
- by *comparing* every few seconds with the successor on the ring, which repairs what
  was lost, and notices the death of a worker that nobody speaks to.

A worker looks for those that were lost just after it on the ring: so the parts of a
group whose network was cut find each other again.

Nothing of this runs in the first `Options.heartbeat_s` seconds, unless something
happens or the program wants to know: a short program pays nothing.  In a static group
nothing of it runs at all.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from asyncrpc.clock import Deadline
from asyncrpc.errors import (
    AsyncRpcError,
    ConnectionLostError,
    MalformedError,
    TransportError,
)
from asyncrpc.ids import WorkerId, WorkerInfo
from asyncrpc.runtime.forms import (
    ID,
    TEXT,
    Form,
    Methods,
    ServiceMethods,
    anything,
    array,
    each,
    whole,
)
from asyncrpc.runtime.machine.membership import (
    BUCKETS,
    SUCCEEDED,
    TOMBSTONE_S,
    TOMBSTONES_MAX,
    Announce,
    Answer,
    Changed,
    ChangeKind,
    Contest,
    Effect,
    Membership,
    Record,
    Warn,
)
from asyncrpc.runtime.machine.ring import CIRCLE, place_of
from asyncrpc.runtime.membership.changes import MemberChange, MemberChanges
from asyncrpc.runtime.membership.finding import Finding
from asyncrpc.runtime.membership.joining import (
    Admission,
    has_taken,
    join_group,
    member_of,
)
from asyncrpc.runtime.membership.members import (
    UNKNOWN_INCARNATION,
    Member,
    Rendezvous,
    Republishing,
    RunningGroup,
)
from asyncrpc.runtime.membership.spreading import (
    BATCH_S,
    FOR_YOU,
    SERVICE,
    Item,
    News,
    pack,
)

if TYPE_CHECKING:
    from asyncrpc.runtime.links.connection import Connection
    from asyncrpc.runtime.links.link import Link
    from asyncrpc.runtime.worker import Worker
    from asyncrpc.wire.messages import Hello

logger = logging.getLogger("asyncrpc")

# News wake a worker that has not begun to compare, but not at once: at the end of a
# program all leave, and there is nobody to tell.
WAKE_S: Final = 0.5
# Between two comparisons, in heartbeats.
ROUND_BEATS: Final = 2
LAST_DIAL_S: Final = 0.08  # for a worker that leaves and is connected to nobody
NEWCOMER_S: Final = 1.0  # in which a worker that was taken in asks who there is


_ITEM: Final[Form] = array(
    limit=whole(FOR_YOU, CIRCLE, "a place on the ring, or -1"), record=anything
)
_EXCHANGE: Final[Form] = array(
    parts=each(whole(0, BUCKETS, f"a part of {BUCKETS}")), records=each(anything)
)
_DIGESTS: Final[Form] = each(ID)
_RECORDS: Final[Form] = each(anything)


class MembershipService(ServiceMethods, Finding):
    """What one worker knows of its group; a `Service`.

    Attributes:
        table: the records.
        news: what is told.
    """

    name = SERVICE

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self.news = News(worker, self._wake)
        self.notices = Methods(SERVICE, {"news": (each(anything), self._on_news)})
        self.requests = Methods(
            SERVICE,
            {
                "ping": (anything, self._on_ping),
                "members": (anything, self._on_members),
                "find": (TEXT, self._on_find),
                "sync": (ID, self._on_sync),
                "exchange": (_EXCHANGE, self._on_exchange),
            },
        )
        self._admission = Admission(worker, self.table, self._carry_out)
        self._changes: list[weakref.ref[MemberChanges]] = []
        self._guests_lost_s: dict[str, float] = {}
        self._newcomers: dict[str, asyncio.TimerHandle] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._unreached: tuple[str, float] = ("", 0.0)  # a successor, and since when
        self._is_displaced = False
        self._succeeded_s: float | None = None  # since when a member says so
        self._contest: asyncio.Task[None] | None = None
        self._turn = 0
        self._begins_alone = True
        self._is_active = False
        self._has_compared = False

    # --- life ------------------------------------------------------------------------

    async def enter(self, rendezvous: Rendezvous, timeout_s: float) -> None:
        """Meet the others, or join those that run.

        Raises:
            RendezvousTimeoutError: they did not come, or none took this worker in.
            UsageError: the name or the rank is taken.

        Cancellation:
            The others may hold this worker to be there; they find that it is not.
        """
        worker = self._worker
        is_static = worker.options.membership == "static"
        table = self.table = Membership(Record(worker.member), is_static=is_static)
        self._admission = Admission(worker, table, self._carry_out)
        members = await rendezvous.join(worker.member, timeout_s)
        if isinstance(members, RunningGroup):
            records = await join_group(worker, members, timeout_s)
            table.begin(records or [Record(worker.member, 1)], worker.loop.time())
            worker.rank = table.me.member.rank
            if isinstance(rendezvous, Republishing):
                await rendezvous.publish(worker.member)
        else:
            table.begin(map(_first_life, members), worker.loop.time())
            self._begins_alone = not _is_list(members)
        self.news.begin(table)
        # Those in a list, too, of whom no more is known than where they are to be.
        listed = members if not isinstance(members, RunningGroup) else []
        worker.directory.add(listed or [one.member for one in table.records])

    def start(self) -> None:
        """Begin to compare, after a heartbeat."""
        if self._begins_alone and len(self.table) > 1:
            self._activate()

    async def close(self) -> None:
        """Tell the others that this worker leaves; end the iterators."""
        self._is_closed = True
        self.news.close()
        timers = [self._timer, *self._newcomers.values()]
        for timer in timers:
            if timer is not None:
                timer.cancel()
        for changes in self._iterators():
            changes.end()
        await self._say_goodbye()

    async def _say_goodbye(self) -> None:
        """Tell all who are connected; one of them tells the others."""
        heir = self.table.successor
        record = self.table.leave(self._worker.loop.time())
        links = self._links()
        if not links and heir and self._has_compared:
            links = await self._link_in_haste(heir)
        heir = heir if heir in links else next(iter(links), "")
        for name, link in links.items():
            limit = place_of(name) if name == heir else FOR_YOU
            link.notify(SERVICE, "news", pack([Item(record, limit)]))

    async def _link_in_haste(self, name: str) -> dict[str, Link]:
        """Connect to somebody who can tell the others, if that takes no time."""
        try:
            async with asyncio.timeout(LAST_DIAL_S):
                return {name: await self._worker.link_to(name)}
        except (AsyncRpcError, TimeoutError):
            return {}

    # --- what programs ask -----------------------------------------------------------

    def changes(self) -> MemberChanges:
        """Return the changes from now on."""
        changes = MemberChanges(self._worker.loop)
        if self._is_closed:
            changes.end()
        else:
            self._changes = [ref for ref in self._changes if ref() is not None]
            self._changes.append(weakref.ref(changes))
            self._activate()
        return changes

    # --- what the directory asks and tells -------------------------------------------

    def refusal(self, hello: Hello) -> str:
        """Say why a worker that dials is not to be spoken to; empty if it is."""
        if self._is_displaced:
            return "another worker has its name now"
        return self.table.refusal(hello.name, hello.incarnation)

    def take_in(self, connection: Connection, hello: Hello) -> None:
        """A worker asks to be taken in."""
        self._admission.take_in(connection, hello)

    def on_link(self, link: Link) -> None:
        """A link has been opened; whatever is sent because of it comes later."""
        hello = link.connection.peer
        if hello is None or link.peer.name == self._worker.name:
            return
        effects = self.table.meet(member_of(hello), self._worker.loop.time())
        if effects:
            self._worker.loop.call_soon(self._carry_out, effects, link)

    # --- what other workers say ------------------------------------------------------

    def _on_news(self, link: Link, value: list[Any]) -> None:
        """Take news; what is wrong with one of them spoils no other.

        Raises:
            MalformedError: one of them makes no sense.
        """
        problem: MalformedError | None = None
        for item in value:
            try:
                _ITEM(f"news of {link.peer.name!r}", item)
                record = Record.unpack(item[1])
            except MalformedError as error:
                problem = problem or error
            else:
                self._take(record, item[0], link)
        if problem is not None:
            raise problem

    async def _on_ping(self, link: Link, value: Any) -> None:
        """Say that this worker is there."""

    async def _on_members(self, link: Link, _value: Any) -> list[list[Any]]:
        self._on_newcomer_ready(link.peer.name)
        return [one.pack() for one in self.table.welcome]

    async def _on_find(self, _link: Link, name: str) -> list[Any] | None:
        record = self.table.get(name)
        return None if record is None else record.pack()

    async def _on_sync(self, _link: Link, digest: int) -> list[int] | None:
        self._activate()
        return None if digest == self.table.digest else self.table.digests

    def on_peer_lost(self, peer: WorkerId, reason: str) -> None:
        """Tell the others, unless they know better."""
        now_s = self._worker.loop.time()
        if self._is_closed:
            return
        known = self.table.get(peer.name)
        if known is None:
            self._guests_lost_s[peer.name] = now_s
        elif known.is_placed and known.incarnation != peer.incarnation:
            # It had said that it was this worker, and was not, or is no more.
            self._note_in_directory(known, peer.incarnation)
        self._carry_out(self.table.lose(peer.name, peer.incarnation, now_s))
        self._forget(now_s)

    def _take(
        self, record: Record, limit: int, link: Link, *, is_repair: bool = False
    ) -> None:
        """Take one record that has come over a link."""
        worker, table = self._worker, self.table
        if self._is_closed:
            return
        before = table.get(record.name)
        heard = table.hear(
            record,
            worker.loop.time(),
            is_linked=worker.directory.link_of(record.incarnation) is not None,
        )
        self._carry_out(heard, link)
        known = table.get(record.name)
        if known is None or known.order != record.order:
            return
        if limit != FOR_YOU:
            self.news.pass_on(record, limit)
        elif is_repair and before is not known:
            self.news.announce(record)

    # --- what the machine decides ----------------------------------------------------

    def _carry_out(self, effects: Iterable[Effect], link: Link | None = None) -> None:
        for effect in effects:
            match effect:
                case Changed():
                    self._on_changed(effect)
                case Announce(record):
                    self._announce(record)
                case Answer(record) if link is not None and not link.is_lost:
                    item = Item(record, FOR_YOU)
                    link.notify(SERVICE, "news", pack([item]))
                case Warn(record):
                    warned = self._worker.directory.link_of(record.incarnation)
                    if warned is not None:
                        item = Item(record, FOR_YOU)
                        warned.notify(SERVICE, "news", pack([item]))
                case Contest(record):
                    self._begin_contest(record)

    def _announce(self, record: Record) -> None:
        """Tell everyone; of a worker that has just come, once it listens."""
        is_newcomer = record.is_alive and record.name != self._worker.name
        if not is_newcomer:
            self.news.announce(record)
            return
        self._newcomers[record.name] = self._worker.loop.call_later(
            NEWCOMER_S, self._on_newcomer_ready, record.name
        )

    def _on_newcomer_ready(self, name: str) -> None:
        timer, record = self._newcomers.pop(name, None), self.table.get(name)
        if timer is not None and record is not None:
            timer.cancel()
            self.news.announce(record)

    def _on_changed(self, change: Changed) -> None:
        worker, record, kind = self._worker, change.record, change.kind
        name, link_of = record.name, worker.directory.link_of
        if change.previous not in (UNKNOWN_INCARNATION, record.incarnation):
            self._end_former(name, WorkerId(name, change.previous))
        if record.is_alive:
            self._note_in_directory(record, change.previous)
        if kind is ChangeKind.LEFT:
            link = link_of(record.incarnation)
            if link is None:
                worker.on_peer_lost(WorkerId(name, record.incarnation), "it has left")
            elif link.connection.is_broken:  # nobody will resume it
                link.connection.end(ConnectionLostError("it has left"))
        if kind is not None:
            info = WorkerInfo(name, record.member.rank)
            for changes in self._iterators():
                changes.put(MemberChange(kind, info, record.incarnation))

    def _end_former(self, name: str, former: WorkerId) -> None:
        """A worker has been restarted: whatever concerned its former life is over."""
        link = self._worker.directory.link_of(former.incarnation)
        if link is not None:
            link.connection.end(ConnectionLostError("the worker has been restarted"))
        else:
            self._worker.on_peer_lost(former, "it has been restarted")

    def _note_in_directory(self, record: Record, previous: int) -> None:
        """Have calls go where the worker is now."""
        known = self._worker.directory.known_incarnation(record.name)
        if known in (None, UNKNOWN_INCARNATION, previous, record.incarnation):
            self._worker.directory.add([record.member])

    def _begin_contest(self, record: Record) -> None:
        if self._contest is None and not self._is_closed:
            self._contest = self._worker.start_task(self._contend(record))

    async def _contend(self, record: Record) -> None:
        """Find out whether a later worker has this one's name."""
        try:
            is_there = await has_taken(self._worker, record.member)
        except (TransportError, TimeoutError):
            is_there = False
        if is_there:
            self._on_displaced(", ".join(record.member.addresses))
            return  # and never look again
        self._contest = None
        self._carry_out(self.table.outlive(record))

    def _on_succeeded(self, by: str, now_s: float) -> None:
        """A member takes this worker for a former life of its name.

        It may not have heard yet which of two lives is the later.  The others tell it.
        """
        if self._succeeded_s is None:
            self._succeeded_s = now_s
        elif now_s - self._succeeded_s >= self._worker.options.lost_after_s:
            self._on_displaced(f"as {by!r} says")

    def _on_displaced(self, where: str) -> None:
        if not self._is_displaced:
            self._is_displaced = True
            logger.error(
                "worker %r: another worker (%s) has its name now; no member will speak "
                "to this one any more: shut it down",
                self._worker.name,
                where,
            )
            for link in self._links().values():
                link.connection.close("another worker has its name now")

    def _iterators(self) -> list[MemberChanges]:
        found = (ref() for ref in self._changes)
        return [one for one in found if one is not None]

    # --- comparing -------------------------------------------------------------------

    def _wake(self) -> float:
        """There are news: compare from now on.  Return how long the news wait."""
        wait_s = BATCH_S if self._has_compared else WAKE_S
        self._activate()
        return wait_s

    def _activate(self) -> None:
        if self._is_active or self._is_closed or self.table.is_static:
            return
        self._is_active = True
        # Not all in the same moment: each at its place in the first round.
        phase = place_of(self._worker.name) / CIRCLE
        beat_s = self._worker.options.heartbeat_s
        self._schedule(beat_s * (1 + phase))

    def _schedule(self, after_s: float) -> None:
        if not self._is_closed:
            loop = self._worker.loop
            self._timer = loop.call_later(after_s, self._begin_round)

    def _begin_round(self) -> None:
        self._has_compared = True
        self._worker.start_task(self._round())

    async def _round(self) -> None:
        """Compare with the successor, and look for one that was lost."""
        try:
            self._forget(self._worker.loop.time())
            if self.table.successor:
                await self._visit(self.table.successor)
            self._turn += 1
            lost = self.table.lost_one(self._turn)
            if lost:
                await self._look_for(lost)
        finally:
            self._schedule(ROUND_BEATS * self._worker.options.heartbeat_s)

    async def _visit(self, name: str) -> None:
        """Compare with the successor; if it cannot be reached for long, it is lost."""
        worker = self._worker
        record = self.table.get(name)
        try:
            await self._compare(await worker.link_to(name))
            self._succeeded_s = None
        except (AsyncRpcError, TimeoutError) as error:
            now_s = worker.loop.time()
            if SUCCEEDED in str(error):
                self._on_succeeded(name, now_s)
            if record is None or worker.directory.link_of(record.incarnation):
                return  # the link says when it is lost
            if self._unreached[0] != name:
                self._unreached = (name, now_s)
            is_over = now_s - self._unreached[1] >= worker.options.lost_after_s
            if is_over:
                lost = self.table.lose(name, record.incarnation, now_s)
                self._carry_out(lost)
        else:
            self._unreached = ("", 0.0)

    async def _look_for(self, name: str) -> None:
        """Try to reach a worker that was lost; if it is there, it will say so."""
        try:
            await self._compare(await self._worker.link_to(name))
        except (AsyncRpcError, TimeoutError):
            return

    async def _compare(self, link: Link) -> None:
        """Exchange what one of the two workers does not know."""
        limit_s = self._worker.options.connect_timeout_s
        deadline = Deadline.after(limit_s, self._worker.loop.time())
        digests = await link.request_service(
            SERVICE, "sync", self.table.digest, deadline=deadline
        )
        if digests is None:
            return
        who = link.peer.name
        _DIGESTS(f"the digests of {who!r}", digests)
        parts = self.table.differing(digests)
        ours = [one.pack() for one in self.table.part(parts)]
        theirs = await link.request_service(
            SERVICE, "exchange", [parts, ours], deadline=deadline
        )
        _RECORDS(f"the records of {who!r}", theirs)
        for packed in theirs:
            self._take(Record.unpack(packed), FOR_YOU, link, is_repair=True)

    async def _on_exchange(self, link: Link, value: list[Any]) -> list[list[Any]]:
        parts, packed, *_ = value
        theirs = [Record.unpack(one) for one in packed]
        better = self.table.better(parts, theirs)
        for record in theirs:
            self._take(record, FOR_YOU, link, is_repair=True)
        return [one.pack() for one in better]

    def _forget(self, now_s: float) -> None:
        """Let go of those who died long ago."""
        gone = self.table.forget(now_s)
        for name, lost_s in list(self._guests_lost_s.items()):
            is_over = len(self._guests_lost_s) > TOMBSTONES_MAX
            if lost_s + TOMBSTONE_S > now_s and not is_over:
                break
            del self._guests_lost_s[name]
            if self.table.get(name) is None:
                gone.append(name)
        for name in gone:
            self._worker.directory.forget(name)


def _first_life(member: Member) -> Record:
    """Return the record of a worker that was there when the group began."""
    is_listed = member.incarnation == UNKNOWN_INCARNATION
    return Record(member, generation=0 if is_listed else 1)


def _is_list(members: Iterable[Member]) -> bool:
    return any(one.incarnation == UNKNOWN_INCARNATION for one in members)
