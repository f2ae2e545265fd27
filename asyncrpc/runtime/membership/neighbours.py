"""Words to workers by rank: at once where there is a link, else over one that is made.

For what goes round a group (barriers, the end).  A word says what its sender knows when
it is written, so one that waits for a link is never out of date, and one is enough.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from asyncrpc.errors import (
    AsyncRpcError,
    MalformedError,
    UnknownWorkerError,
)

if TYPE_CHECKING:
    from asyncrpc.runtime.links.link import Link
    from asyncrpc.runtime.worker import Worker

STALL_S: Final = 0.05  # of silence, after which everything known is told again
# So long may the last word of a worker that has left be on its way.
LAST_WORD_S: Final = 0.5


class Neighbours:
    """The workers that one worker speaks to or waits for, by rank."""

    def __init__(
        self,
        worker: Worker,
        say: Callable[[Link], None],
        on_gone: Callable[[int, str], None],
    ) -> None:
        """Prepare to speak.

        Args:
            worker: whose neighbours they are.
            say: writes the word of this moment to a link.
            on_gone: called with a rank that cannot be reached, and why.
        """
        self._worker = worker
        self._say = say
        self._on_gone = on_gone
        self._dials: dict[int, asyncio.Task[None]] = {}
        self._to_be_told: set[int] = set()

    def tell(self, rank: int) -> None:
        """Say the word of this moment to a worker, now or once it is connected."""
        link = self._link(rank)
        if link is not None:
            self._say(link)
        else:
            self._to_be_told.add(rank)
            self._dial(rank)

    def watch(self, rank: int, *, was_seen_going: bool = False) -> None:
        """Connect to a worker that is waited for: or nobody would tell of its death.

        Args:
            rank: of the worker.
            was_seen_going: its last word would have come before its link ended.
        """
        if self._link(rank) is None:
            self._dial(rank, 0.0 if was_seen_going else LAST_WORD_S)

    async def settle(self) -> None:
        """Wait until everyone has been told, or cannot be.

        Cancellation:
            Some have not been told.
        """
        while self._to_be_told:  # each dial has a limit, and then takes its rank out
            await asyncio.wait([self._dials[rank] for rank in self._to_be_told])

    def forget(self) -> None:
        """Tell no more."""
        self._to_be_told.clear()
        for dial in self._dials.values():
            dial.cancel()
        self._dials.clear()

    def name_of(self, rank: int) -> str:
        """Return the name of a worker, for people to read."""
        try:
            return self._worker.directory.find(rank).member.name
        except UnknownWorkerError:
            return f"rank {rank}"

    def rank_of(self, name: str) -> int:
        """Return the rank of a worker; -1 if it has none, or is forgotten."""
        try:
            return self._worker.directory.find(name).member.rank
        except UnknownWorkerError:
            return -1

    def check_rank(self, link: Link) -> None:
        """Refuse the word of a worker that has no rank among those of the group.

        Raises:
            MalformedError: it has none.
        """
        if not 0 <= self.rank_of(link.peer.name) < self._worker.world_size:
            raise MalformedError(
                f"worker {link.peer.name!r} has no rank in this group, and no say in it"
            )

    def _link(self, rank: int) -> Link | None:
        try:
            return self._worker.directory.find(rank).link
        except UnknownWorkerError:  # dialing tells
            return None

    def _dial(self, rank: int, patience_s: float = LAST_WORD_S) -> None:
        if rank not in self._dials:
            dial = self._worker.start_task(self._connect(rank, patience_s))
            self._dials[rank] = dial
            dial.add_done_callback(lambda _: self._on_ended(rank, dial))

    def _on_ended(self, rank: int, dial: asyncio.Task[None]) -> None:
        """Take note of a dial that was cancelled before it began, and did nothing."""
        if self._dials.get(rank) is dial:
            del self._dials[rank]
            self._to_be_told.discard(rank)

    async def _connect(self, rank: int, patience_s: float) -> None:
        gone = ""
        try:
            member = self._worker.directory.find(rank).member
            link = await self._worker.link_to(member.name)
            if rank in self._to_be_told:
                self._say(link)
        except AsyncRpcError as error:
            gone = str(error)
            self._to_be_told.discard(rank)
            await asyncio.sleep(patience_s)  # it may have left in order, having told
        finally:  # also when this worker shuts down: `settle` waits for it
            self._to_be_told.discard(rank)
            self._dials.pop(rank, None)
        if gone:
            self._on_gone(rank, gone)
