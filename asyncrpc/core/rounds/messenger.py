"""Messages to workers by rank: sent at once over a link, else once it is connected.

A message is made when it is written, from the present state of its sender.  So a
message that waits for a link is never out of date, and one message per rank is enough.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

from asyncrpc.core.members import UNKNOWN_INCARNATION
from asyncrpc.core.membership.ports import Peers
from asyncrpc.core.services.ports import PeerLink, Scheduler
from asyncrpc.errors import AsyncRpcError, UnknownWorkerError

STALL_S: Final = 0.05  # of silence, after which the whole state is sent again
# The last message of a worker that has left may be on its way for so long.
LAST_MESSAGE_S: Final = 0.5


def name_of(peers: Peers, rank: int) -> str:
    """Return the name of a worker, for people to read."""
    try:
        return peers.member(rank).name
    except UnknownWorkerError:
        return f"rank {rank}"


def rank_of(peers: Peers, name: str) -> int:
    """Return the rank of a worker; -1 if it has no rank, or is forgotten."""
    try:
        return peers.member(name).rank
    except UnknownWorkerError:
        return -1


class PeerMessenger:
    """Sends the newest state to the workers that one worker waits for, by rank."""

    def __init__(
        self,
        scheduler: Scheduler,
        peers: Peers,
        write: Callable[[PeerLink], None],
        on_unreachable: Callable[[int, str], None],
    ) -> None:
        self._scheduler = scheduler
        self._peers = peers
        self._write = write
        self._on_unreachable = on_unreachable
        self._dials: dict[int, asyncio.Task[None]] = {}
        self._unsent: set[int] = set()

    def send(self, rank: int) -> None:
        """Send the present message to a worker, now or once it is connected."""
        link = self._link(rank)
        if link is not None:
            self._write(link)
        else:
            self._unsent.add(rank)
            self._dial(rank)

    def connect(self, rank: int, *, was_seen_going: bool = False) -> None:
        """Connect to a worker whose message is awaited, to notice its death."""
        if self._link(rank) is None:
            self._dial(rank, 0.0 if was_seen_going else LAST_MESSAGE_S)

    async def wait_sent(self) -> None:
        """Wait until each message has been written, or its dial has failed.

        Cancellation:
            Some messages have not been written.
        """
        while self._unsent:  # each dial has a limit, and then takes its rank out
            await asyncio.wait([self._dials[rank] for rank in self._unsent])

    def cancel(self) -> None:
        """Send no more."""
        self._unsent.clear()
        for dial in self._dials.values():
            dial.cancel()
        self._dials.clear()

    def _link(self, rank: int) -> PeerLink | None:
        try:
            return self._peers.find(rank).link
        except UnknownWorkerError:  # the dial reports it
            return None

    def _dial(self, rank: int, patience_s: float = LAST_MESSAGE_S) -> None:
        if rank not in self._dials:
            dial = self._scheduler.start_task(self._connect(rank, patience_s))
            self._dials[rank] = dial
            dial.add_done_callback(lambda _: self._on_ended(rank, dial))

    def _on_ended(self, rank: int, dial: asyncio.Task[None]) -> None:
        """Clean up after a dial that was cancelled before it began."""
        if self._dials.get(rank) is dial:
            del self._dials[rank]
            self._unsent.discard(rank)

    async def _connect(self, rank: int, patience_s: float) -> None:
        gone, dialed = "", UNKNOWN_INCARNATION
        try:
            member = self._peers.member(rank)
            dialed = member.incarnation
            link = await self._peers.open_link(member.name)
            if rank in self._unsent:
                self._write(link)
        except AsyncRpcError as error:
            gone = str(error)
            self._unsent.discard(rank)
            await asyncio.sleep(patience_s)  # its last message may be on its way
        finally:  # also when this worker shuts down: `wait_sent` waits for it
            self._unsent.discard(rank)
            self._dials.pop(rank, None)
        if gone and dialed != UNKNOWN_INCARNATION:
            with contextlib.suppress(UnknownWorkerError):
                if self._peers.member(rank).incarnation != dialed:  # it was restarted
                    self.connect(rank)
                    return
        if gone:
            self._on_unreachable(rank, gone)
