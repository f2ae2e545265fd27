"""Doubts: workers that others say have ended, and what they say themselves.

What a worker says of another is a hint.  It is believed at once, and the life that is
said to have ended is asked within a heartbeat, and before a call dials a later one.  If
it answers, it is told what is said of it, and refutes that in the whole group.

Of two lives of a name of which this worker has a link to one, that one counts while it
answers, and while the other does not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from asyncrpc.core.identity import WorkerIdentity
from asyncrpc.core.ids import WorkerId
from asyncrpc.core.links.directory import Directory
from asyncrpc.core.links.link import Link
from asyncrpc.core.members import Member
from asyncrpc.core.membership.comparison import MembershipTimes
from asyncrpc.core.membership.machine.membership import Membership
from asyncrpc.core.membership.machine.records import Effect, Record
from asyncrpc.core.membership.machine.ring import CIRCLE, place_of
from asyncrpc.core.membership.messages import (
    RECEIVER_ONLY,
    MemberNews,
    News,
    PingMember,
)
from asyncrpc.core.services.ports import Scheduler, ask
from asyncrpc.errors import (
    AsyncRpcError,
    ConnectionLostError,
    RefusedError,
    TransportError,
)

ASKED_MAX: Final = 16  # workers that are asked at a time
ANSWER_S: Final = 1.0  # in which one that lives answers
DOUBTS_MAX: Final = 8_192  # workers that wait to be asked; then the oldest is not
CONTESTS_MAX: Final = 64  # names of which two lives are compared at a time


class Doubts:
    """What one worker doubts of what others say."""

    def __init__(
        self,
        identity: WorkerIdentity,
        scheduler: Scheduler,
        peers: Directory,
        times: MembershipTimes,
        *,
        table: Callable[[], Membership],
        answers: Callable[[Member], Awaitable[bool]],
        compare: Callable[[Link], Awaitable[None]],
        carry_out: Callable[[Iterable[Effect]], None],
        end_former: Callable[[WorkerId], None],
        on_gone: Callable[[WorkerId], None],
    ) -> None:
        self._identity = identity
        self._scheduler = scheduler
        self._peers = peers
        self._times = times
        self._table = table
        self._answers = answers
        self._compare = compare
        self._carry_out = carry_out
        self._end_former = end_former
        self._on_gone = on_gone
        self._waiting: dict[str, Member] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._contested: set[str] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    def add(self, member: Member) -> None:
        """Ask a worker whether it is there, within a heartbeat."""
        if self._is_closed or member.name in self._waiting:
            return
        self._waiting[member.name] = member
        if len(self._waiting) > DOUBTS_MAX:
            del self._waiting[next(iter(self._waiting))]
        if self._timer is None:
            # Not all members in the same moment.
            phase = place_of(self._identity.name) / CIRCLE
            after_s = self._times.heartbeat_s * phase
            self._timer = self._scheduler.loop.call_later(after_s, self._ask_next)

    def on_unused_lost(self, peer: WorkerId) -> None:
        """Ask a worker whose connection ended before its first use if it is there."""
        record = self._table().get(peer.name)
        is_same = record is not None and record.incarnation == peer.incarnation
        if record is not None and is_same and record.is_alive:
            self.add(record.member)

    def discard(self, name: str) -> None:
        """There is a link to the worker: nobody need be asked."""
        self._waiting.pop(name, None)

    async def settle(self, name: str) -> None:
        """Wait until a worker that is doubted has been asked; it is asked at once."""
        asking = self._asking.get(name)
        if asking is None and name in self._waiting:
            asking = self._begin(name)
        if asking is not None:
            await asyncio.wait({asking})

    def close(self) -> None:
        """Ask nobody any more."""
        self._is_closed = True
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()

    # --- one life --------------------------------------------------------------------

    def _ask_next(self) -> None:
        self._timer = None
        while self._waiting and len(self._asking) < ASKED_MAX:
            self._begin(next(iter(self._waiting)))

    def _begin(self, name: str) -> asyncio.Task[None]:
        task = self._scheduler.start_task(self._ask(self._waiting.pop(name)))
        self._asking[name] = task

        def on_end(_: asyncio.Task[None]) -> None:
            del self._asking[name]
            if self._timer is None:
                self._ask_next()

        task.add_done_callback(on_end)
        return task

    async def _ask(self, member: Member) -> None:
        if member.gateway:
            await self._ask_gateway(member)
            return
        is_refused = False
        try:
            limit_s = min(ANSWER_S, self._times.connect_timeout_s)
            async with asyncio.timeout(limit_s):
                is_there = await self._answers(member)
        except (TransportError, TimeoutError) as error:
            is_there, is_refused = False, isinstance(error, RefusedError)
        if is_there:
            self._on_answer(member)
        else:
            self._on_silence(member, is_refused=is_refused)

    def _on_answer(self, member: Member) -> None:
        """The life that was said to have ended is there: it must know what is said."""
        record = self._table().get(member.name)
        if self._is_closed:
            return
        is_same = record is not None and record.incarnation == member.incarnation
        if is_same and record is not None and record.is_alive:
            return
        if not is_same:
            self._peers.add([member])
        link = self._peers.link_of(member.incarnation)
        if link is None or record is None:  # a new link tells it
            self._scheduler.start_task(self._link_to(member.name))
        else:
            _tell(link, record)

    async def _link_to(self, name: str) -> None:
        try:
            await self._compare(await self._peers.open_link(name))
        except (AsyncRpcError, TimeoutError):  # it has ended meanwhile
            return

    def _on_silence(self, member: Member, *, is_refused: bool) -> None:
        table = self._table()
        record = table.get(member.name)
        if record is None or self._is_closed:
            return
        if record.incarnation != member.incarnation:
            table.confirm(member.name)
            self._end_former(WorkerId(member.name, member.incarnation))
            return
        is_gone = is_refused or member.name in table.hearsay
        if (
            is_gone
            and record.is_alive
            and self._peers.link_of(member.incarnation) is None
        ):
            self._on_gone(WorkerId(member.name, member.incarnation))

    async def _ask_gateway(self, guest: Member) -> None:
        """Let the gateway of a guest, which cannot be dialed, tell it what is said."""
        record = self._table().get(guest.name)
        link = self._peers.link_of(guest.incarnation)
        try:
            if link is None and guest.gateway != self._identity.name:
                link = await self._peers.open_link(guest.gateway)
        except AsyncRpcError:  # with its gateway, a guest has ended
            return
        if link is not None and record is not None:
            _tell(link, record)

    # --- two lives -------------------------------------------------------------------

    def contest(self, present: Record, later: Record) -> None:
        """Find out which of two lives of a name there is."""
        if present.name in self._contested or len(self._contested) >= CONTESTS_MAX:
            return  # it is heard again
        self._contested.add(present.name)
        is_linked = self._peers.link_of(present.incarnation) is not None
        contest = self._contest if is_linked else self._let_deny
        self._scheduler.start_task(contest(present, later))

    async def _let_deny(self, present: Record, later: Record) -> None:
        """Tell a worker what others believe of it, over a new link."""
        try:
            link = await self._peers.open_link(present.name)
            if link.peer.incarnation == present.incarnation:
                _tell(link, later)
        except (AsyncRpcError, TimeoutError):
            return  # it has ended meanwhile, and is looked for
        finally:
            self._contested.discard(present.name)

    async def _contest(self, present: Record, later: Record) -> None:
        try:
            is_there = later.is_alive and await self._answers(later.member)
        except (TransportError, TimeoutError):
            is_there = False
        try:
            link = self._peers.link_of(present.incarnation)
            if link is None:
                return  # it has ended, and is looked for
            if is_there and not await _answers_over(link):
                error = ConnectionLostError("the worker has been restarted")
                link.connection.end(error)
                now_s = self._scheduler.loop.time()
                self._carry_out(self._table().receive(later, now_s))
            else:
                _tell(link, later)  # which outlives it
        finally:
            self._contested.discard(present.name)


async def _answers_over(link: Link) -> bool:
    """Return whether a worker answers; the link ends if it is lost."""
    try:
        await ask(link, PingMember())
    except AsyncRpcError:
        return False
    return True


def _tell(link: Link, record: Record) -> None:
    link.tell(MemberNews([News(RECEIVER_ONLY, record)]))
