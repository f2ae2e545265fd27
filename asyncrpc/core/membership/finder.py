"""Finds workers: which members to ask about a name.

Any member can answer.  A worker asks members that it is connected to, and those just
after the name's place on the ring, which get news of the name early.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from asyncrpc.core.identity import WorkerIdentity
from asyncrpc.core.ids import Incarnation
from asyncrpc.core.links.directory import Directory
from asyncrpc.core.links.link import Link
from asyncrpc.core.loop.clock import Deadline
from asyncrpc.core.membership.machine.membership import (
    Membership,
)
from asyncrpc.core.membership.machine.records import (
    Record,
)
from asyncrpc.core.membership.machine.ring import place_of
from asyncrpc.core.membership.messages import RECEIVER_ONLY, FindMember
from asyncrpc.core.services.ports import Scheduler, ask
from asyncrpc.errors import UnknownWorkerError

# Takes a record that arrived over a link, and the part of the ring to tell.
TakeRecord: TypeAlias = Callable[[Record, int, Link], None]

HOLDERS_MAX: Final = 9  # members that say which life of a name they know
ASKED_MAX: Final = 3  # members that are asked where another one is
REFRESH_S: Final = 1.0  # for their answer, when a dial has failed


class Finder:
    """Asks other members where a worker is."""

    def __init__(
        self,
        identity: WorkerIdentity,
        scheduler: Scheduler,
        peers: Directory,
        take: TakeRecord,
    ) -> None:
        self._identity = identity
        self._scheduler = scheduler
        self._peers = peers
        self._take = take

    def links(self) -> dict[str, Link]:
        """Return the links to others, by name."""
        return {
            link.peer.name: link
            for link in self._peers.links
            if link.peer.name != self._identity.name and not link.is_lost
        }

    async def find(self, table: Membership, name: str, timeout_s: float) -> None:
        """Ask others about a worker that this one does not know."""
        known = table.get(name)
        if known is not None and known.is_alive:
            return
        asked = [*self._linked(table, name), *self._far(table, name)]
        await self._ask(name, list(dict.fromkeys(asked))[:ASKED_MAX], timeout_s)
        known = table.get(name)
        if known is None or not known.is_alive:
            raise UnknownWorkerError(name, [record.name for record in table.records])

    async def refresh(self, table: Membership, name: str) -> bool:
        """Ask connected members whether a worker has moved."""
        before = table.get(name)
        if table.is_static or before is None:
            return False
        peers = self._peers
        if before.is_placed and peers.known_incarnation(name) != before.incarnation:
            peers.add([before.member])  # another worker had claimed the name
            return True
        await self._ask(name, self._linked(table, name)[:ASKED_MAX], REFRESH_S)
        after = table.get(name)
        return after is not None and after.is_alive and after.member != before.member

    async def holders(self, table: Membership, name: str) -> list[Incarnation]:
        """Return which lives of a name the members know that are linked to here."""
        asked_members = self._linked(table, name)[:HOLDERS_MAX]
        deadline = Deadline.after(REFRESH_S, self._scheduler.loop.time())
        links = self.links()

        async def know(other: str) -> Record | None:
            return await ask(links[other], FindMember(name), deadline=deadline)

        asking = [know(other) for other in asked_members]
        answers = await asyncio.gather(*asking, return_exceptions=True)
        known = [answer for answer in answers if isinstance(answer, Record)]
        return [record.incarnation for record in known if record.is_alive]

    def _linked(self, table: Membership, name: str) -> list[str]:
        """Return the members that this worker has a link to, except one."""
        linked = self.links()
        return [
            member_name
            for member_name in linked
            if member_name != name and member_name in table.carriers
        ]

    def _far(self, table: Membership, name: str) -> list[str]:
        """Return the members after the place of a name, except this worker."""
        far, place = [], place_of(name)
        for _ in range(ASKED_MAX + 1):
            member_name = table.carriers.after(place + 1)
            if member_name not in ("", name, self._identity.name):
                far.append(member_name)
            place = place_of(member_name)
        return far

    async def _ask(
        self, name: str, asked_members: Sequence[str], timeout_s: float
    ) -> None:
        deadline = Deadline.after(timeout_s, self._scheduler.loop.time())

        async def find(member_name: str) -> None:
            link = await self._peers.open_link(member_name)
            record = await ask(link, FindMember(name), deadline=deadline)
            if record is not None:
                self._take(record, RECEIVER_ONLY, link)

        asking = [
            self._scheduler.start_task(find(member_name))
            for member_name in asked_members
        ]
        try:
            if asking:
                async with asyncio.timeout(timeout_s):
                    await asyncio.gather(*asking, return_exceptions=True)
        except TimeoutError:
            return
        finally:
            for task in asking:
                task.cancel()
