"""Comparison: repairs lost news, and finds members that died unnoticed.

Every few seconds a worker compares its records with those of its successor on the ring,
and looks for a lost worker nearby: so the parts of a group whose network was cut find
each other again.

Nothing of this runs in the first `LivenessOptions.heartbeat_s` seconds, unless
something happens or the program asks for changes: a short program pays nothing.

Source: anti-entropy, as in Demers et al., "Epidemic algorithms for replicated database
maintenance", PODC 1987.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from asyncrpc.core.identity import WorkerIdentity
from asyncrpc.core.links.directory import Directory
from asyncrpc.core.links.link import Link
from asyncrpc.core.loop.clock import Deadline
from asyncrpc.core.membership.machine.membership import (
    SUCCEEDED,
    Membership,
)
from asyncrpc.core.membership.machine.records import (
    Record,
)
from asyncrpc.core.membership.machine.ring import CIRCLE, place_of
from asyncrpc.core.membership.messages import (
    RECEIVER_ONLY,
    CompareDigest,
    ExchangeRecords,
)
from asyncrpc.core.services.ports import Scheduler, ask
from asyncrpc.errors import AsyncRpcError

if TYPE_CHECKING:
    from asyncrpc.core.membership.service import MembershipService


@dataclass(frozen=True, slots=True)
class MembershipTimes:
    """How often a worker compares, and how long it waits for others.

    Attributes:
        heartbeat_s: seconds; a worker compares once in a few heartbeats.
        lost_after_s: seconds without an answer after which a member is lost.
        connect_timeout_s: seconds that a member may take to answer.
    """

    heartbeat_s: float
    lost_after_s: float
    connect_timeout_s: float


# Between two comparisons, in heartbeats.
ROUND_BEATS: Final = 2


class Comparison:
    """Compares the records of one worker with those of others.

    Attributes:
        has_begun: whether it has compared at least once.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        scheduler: Scheduler,
        peers: Directory,
        times: MembershipTimes,
        *,
        table: Membership,
        records: MembershipService,
    ) -> None:
        self.has_begun = False
        self._identity = identity
        self._scheduler = scheduler
        self._peers = peers
        self._times = times
        self._table = table
        self._records = records
        self._timer: asyncio.TimerHandle | None = None
        self._unreached: tuple[str, float] = ("", 0.0)  # a successor, and since when
        self._turn = 0
        self._is_active = False
        self._is_closed = False

    def begin(self, table: Membership) -> None:
        """Compare another table."""
        self._table = table

    def activate(self) -> None:
        """Compare from now on; the first time after a heartbeat."""
        if self._is_active or self._is_closed or self._table.is_static:
            return
        self._is_active = True
        # Not all workers at the same moment: each at its place in the first round.
        phase = place_of(self._identity.name) / CIRCLE
        self._schedule(self._times.heartbeat_s * (1 + phase))

    def close(self) -> None:
        """Stop comparing."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _schedule(self, after_s: float) -> None:
        if not self._is_closed:
            loop = self._scheduler.loop
            self._timer = loop.call_later(after_s, self.begin_round)

    def begin_round(self) -> None:
        """Compare now."""
        self.has_begun = True
        self._scheduler.start_task(self._round())

    async def _round(self) -> None:
        """Compare with the successor, and look for a lost member."""
        table = self._table
        try:
            self._records.forget_old(self._scheduler.loop.time())
            if table.successor:
                await self._visit(table.successor)
            self._turn += 1
            lost = table.next_lost(self._turn)
            if lost:
                await self._look_for(lost)
        finally:
            self._schedule(ROUND_BEATS * self._times.heartbeat_s)

    async def _visit(self, name: str) -> None:
        """Compare with the successor; if it cannot be reached for long, it is lost."""
        record = self._table.get(name)
        try:
            await self.compare(await self._peers.open_link(name))
            self._records.on_accepted()
        except (AsyncRpcError, TimeoutError) as error:
            now_s = self._scheduler.loop.time()
            if SUCCEEDED in str(error):
                self._records.on_succeeded(name, now_s)
            if record is None or self._peers.link_of(record.incarnation):
                return  # the link says when it is lost
            if self._unreached[0] != name:
                self._unreached = (name, now_s)
            if now_s - self._unreached[1] >= self._times.lost_after_s:
                lost = self._table.lose(name, record.incarnation, now_s)
                self._records.carry_out(lost)
        else:
            self._unreached = ("", 0.0)

    async def _look_for(self, name: str) -> None:
        """Try to reach a lost worker; if it lives, it refutes its loss."""
        try:
            await self.compare(await self._peers.open_link(name))
        except (AsyncRpcError, TimeoutError):
            return

    async def compare(self, link: Link) -> None:
        """Exchange the records that one of the two workers lacks."""
        table = self._table
        limit_s = self._times.connect_timeout_s
        deadline = Deadline.after(limit_s, self._scheduler.loop.time())
        digests = await ask(link, CompareDigest(table.digest), deadline=deadline)
        if digests is None:
            table.hearsay.confirm(link.peer.incarnation)
            return
        parts = table.differing(digests)
        exchange = ExchangeRecords(parts, table.part(parts))
        for record in await ask(link, exchange, deadline=deadline):
            self._records.take(record, RECEIVER_ONLY, link, is_repair=True)

    # --- what others ask -------------------------------------------------------------

    async def on_sync(self, _: Link, request: CompareDigest) -> list[int] | None:
        """Return the digests of this table's parts; None if the tables are the same."""
        self.activate()
        return None if request.digest == self._table.digest else self._table.digests

    async def on_exchange(self, link: Link, exchange: ExchangeRecords) -> list[Record]:
        """Take records of some parts, and return those that are newer here."""
        better = self._table.better(exchange.parts, exchange.records)
        for record in exchange.records:
            self._records.take(record, RECEIVER_ONLY, link, is_repair=True)
        return better
