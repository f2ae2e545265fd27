"""Gossip: which news to send to which members, many in one message.

News for one worker is collected for a moment, so that fifty departures at once cost it
few messages.  A worker that cannot be reached is passed over: the next one on the ring
informs its part.  Comparison repairs what is lost all the same.  Guests pass nothing
on: each is informed by the member that it joined by.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final

from asyncrpc.core.links.directory import Directory
from asyncrpc.core.membership.machine.membership import (
    Membership,
)
from asyncrpc.core.membership.machine.records import (
    Record,
)
from asyncrpc.core.membership.machine.ring import CIRCLE, place_of
from asyncrpc.core.membership.messages import RECEIVER_ONLY, MemberNews, News
from asyncrpc.core.services.ports import Scheduler
from asyncrpc.errors import AsyncRpcError

NEWCOMER_S: Final = 1.0  # in which an admitted worker asks for the members
BATCH_S: Final = 0.02  # how long news waits for more
ITEMS_MAX: Final = 256  # in one message
PASSED_MAX: Final = 4_096  # records that are remembered as passed on
TRIES_MAX: Final = 3  # workers passed over, one after the other


@dataclass(frozen=True, slots=True)
class Rumor:
    """One piece of news for one worker.

    Attributes:
        limit: the end of the part of the ring that the receiver informs; or
            `RECEIVER_ONLY`.
        tries: how many workers have been skipped.
    """

    record: Record
    limit: int
    tries: int = 0


class Gossip:
    """The news that one worker sends."""

    def __init__(
        self, scheduler: Scheduler, peers: Directory, wake: Callable[[], float]
    ) -> None:
        """Prepare.

        Args:
            wake: called when there is news; returns how long it waits, in seconds.
        """
        self.sent = 0
        self._scheduler = scheduler
        self._peers = peers
        self._wake = wake
        self._table: Membership | None = None
        self._queues: dict[str, dict[str, Rumor]] = {}
        self._newcomers: dict[str, asyncio.TimerHandle] = {}
        self._passed: dict[tuple[str, tuple[int, ...]], None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, table: Membership) -> None:
        """Inform the members of a table from now on."""
        self._table = table

    def announce(self, record: Record) -> None:
        """Send a record to all members."""
        if self._table is not None:
            self.pass_on(record, place_of(self._table.me.name))

    def announce_when_ready(self, record: Record) -> None:
        """Send a record to all members; of one that has just come, once it listens."""
        table = self._table
        if table is None or record.name == table.me.name or not record.is_alive:
            self.announce(record)
            return
        self._newcomers[record.name] = self._scheduler.loop.call_later(
            NEWCOMER_S, self.on_ready, record.name
        )

    def on_ready(self, name: str) -> None:
        """A worker that has just come listens."""
        timer = self._newcomers.pop(name, None)
        if timer is None or self._table is None:
            return
        timer.cancel()
        if (record := self._table.get(name)) is not None:
            self.announce(record)

    def pass_on(self, record: Record, limit: int) -> None:
        """Send a record to a part of the ring; once, however often it arrives."""
        table, key = self._table, (record.name, record.order)
        if table is None or table.is_static or key in self._passed:
            return
        self._passed[key] = None
        if len(self._passed) > PASSED_MAX:
            del self._passed[next(iter(self._passed))]
        for name, part in table.carriers.routes(table.me.name, limit):
            self._queue(name, Rumor(record, part))
        for name in table.guests_of(table.me.name):
            if name != record.name:
                self._queue(name, Rumor(record, RECEIVER_ONLY))

    def close(self) -> None:
        """Send no more news."""
        if self._timer is not None:
            self._timer.cancel()
        for timer in self._newcomers.values():
            timer.cancel()
        self._queues.clear()
        self._table = None

    def _queue(self, name: str, item: Rumor) -> None:
        queue = self._queues.setdefault(name, {})
        known = queue.get(item.record.name)
        if known is not None:
            limit = _wider(name, known.limit, item.limit)
            newer = max(known.record, item.record, key=lambda record: record.order)
            item = replace(item, record=newer, limit=limit)
        queue[item.record.name] = item
        if self._timer is None:
            self._timer = self._scheduler.loop.call_later(self._wake(), self._flush)

    def _flush(self) -> None:
        self._timer = None
        queues, self._queues = self._queues, {}
        for name, items in queues.items():
            self._scheduler.start_task(self._send(name, list(items.values())))

    async def _send(self, name: str, items: list[Rumor]) -> None:
        try:
            link = await self._peers.open_link(name)
        except AsyncRpcError:
            self._go_past(name, items)
            return
        for start in range(0, len(items), ITEMS_MAX):
            part = items[start : start + ITEMS_MAX]
            link.tell(news_of(part))
            self.sent += 1

    def _go_past(self, name: str, items: Iterable[Rumor]) -> None:
        """Inform the part of the ring that an unreachable worker was to inform."""
        table = self._table
        for item in items:
            if table is None or item.tries >= TRIES_MAX or item.limit == RECEIVER_ONLY:
                return
            route = table.carriers.route_past(name, item.limit)
            if route is not None and route[0] != table.me.name:
                self._queue(route[0], Rumor(item.record, route[1], item.tries + 1))


def news_of(items: Iterable[Rumor]) -> MemberNews:
    """Return news as one message."""
    return MemberNews([News(item.limit, item.record) for item in items])


def _wider(name: str, first: int, second: int) -> int:
    """Return the limit of the larger part of the ring after a worker."""
    here = place_of(name)
    return max(first, second, key=lambda limit: (limit - here) % CIRCLE or CIRCLE)
