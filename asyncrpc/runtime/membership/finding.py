"""Where is a worker?  Whom to ask that may know.

Any member can say: those that this one is connected to, and those whose place on the
ring comes after the name's, to whom news of it came early.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from asyncrpc.clock import Deadline
from asyncrpc.errors import UnknownWorkerError
from asyncrpc.ids import WorkerInfo
from asyncrpc.runtime.machine.membership import Membership, Record
from asyncrpc.runtime.machine.ring import place_of
from asyncrpc.runtime.membership.spreading import FOR_YOU, SERVICE

if TYPE_CHECKING:
    from asyncrpc.runtime.links.link import Link
    from asyncrpc.runtime.worker import Worker

ASKED_MAX: Final = 3  # members that are asked where another one is
REFRESH_S: Final = 1.0  # for their answer, when a dial has failed


class Finding(ABC):
    """The part of the membership that asks others."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.table = Membership(Record(worker.member))
        self._is_closed = False

    @abstractmethod
    def _take(self, record: Record, limit: int, link: Link) -> None:
        """Take one record that has come over a link."""

    @property
    def known(self) -> list[WorkerInfo]:
        """Every member that is there, as far as is known; this one included."""
        return [WorkerInfo(one.name, one.member.rank) for one in self.table.records]

    def _links(self) -> dict[str, Link]:
        """Return the links to others, by name."""
        return {
            link.peer.name: link
            for link in self._worker.directory.links
            if link.peer.name != self._worker.name and not link.is_lost
        }

    async def find(self, name: str, timeout_s: float) -> None:
        """Ask others where a worker is that this one does not know.

        Raises:
            UnknownWorkerError: nobody knows.

        Cancellation:
            Nothing has changed.
        """
        known = self.table.get(name)
        if known is not None and known.is_alive:
            return
        asked = [*self._linked(name), *self._far(name)]
        await self._ask(name, list(dict.fromkeys(asked))[:ASKED_MAX], timeout_s)
        known = self.table.get(name)
        if known is None or not known.is_alive:
            raise UnknownWorkerError(name, [one.name for one in self.known])

    async def refresh(self, name: str) -> bool:
        """Ask those who are connected whether a worker is elsewhere now.

        Returns:
            Whether it is: a dial that has failed is worth another try.

        Cancellation:
            Nothing has changed.
        """
        before = self.table.get(name)
        if self._is_closed or self.table.is_static or before is None:
            return False
        directory = self._worker.directory
        if before.is_placed and directory.known_incarnation(name) != before.incarnation:
            directory.add([before.member])  # another one had introduced itself as this
            return True
        await self._ask(name, self._linked(name)[:ASKED_MAX], REFRESH_S)
        after = self.table.get(name)
        return after is not None and after.is_alive and after.member != before.member

    def _linked(self, name: str) -> list[str]:
        """Return the members that this worker has a link to, but one."""
        linked = self._links()
        return [one for one in linked if one != name and one in self.table.alive]

    def _far(self, name: str) -> list[str]:
        """Return the members after the place of a name, this worker left out."""
        found, place = [], place_of(name)
        for _ in range(ASKED_MAX + 1):
            one = self.table.alive.after(place + 1)
            if one not in ("", name, self._worker.name):
                found.append(one)
            place = place_of(one)
        return found

    async def _ask(self, name: str, whom: Sequence[str], timeout_s: float) -> None:
        deadline = Deadline.after(timeout_s, self._worker.loop.time())

        async def ask(one: str) -> None:
            link = await self._worker.link_to(one)
            answer = await link.request_service(
                SERVICE, "find", name, deadline=deadline
            )
            if answer is not None:
                self._take(Record.unpack(answer), FOR_YOU, link)

        asking = [self._worker.start_task(ask(one)) for one in whom]
        try:
            if asking:
                async with asyncio.timeout(timeout_s):
                    await asyncio.gather(*asking, return_exceptions=True)
        except TimeoutError:
            return
        finally:
            for task in asking:
                task.cancel()
