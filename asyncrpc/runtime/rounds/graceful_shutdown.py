"""Graceful shutdown: the group ends once nothing is in flight anywhere.

`machine.termination` decides, by waves that are rounds; here are its inputs: whether
this worker is busy, and how many calls it has started.  Both are read when a wave asks
for them, so that they cost a call nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from asyncrpc.errors import UnknownWorkerError
from asyncrpc.runtime.membership.ports import MemberLink, Peers
from asyncrpc.runtime.ports import Identity, Scheduler
from asyncrpc.runtime.rounds.machine.termination import Phase, Termination
from asyncrpc.runtime.rounds.machine.words import Key, Word
from asyncrpc.runtime.rounds.messages import LeftOutNotice
from asyncrpc.runtime.rounds.messenger import name_of
from asyncrpc.runtime.rounds.service import RoundService

# How often a busy worker looks whether it is idle: nothing tells it of each call.
LOOK_FIRST_S: Final = 0.001
LOOK_MAX_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class ShutdownReport:
    """How the wait for the others has ended.

    Attributes:
        phase: how far the group has come.
        is_late: whether the time for all of it has passed.
        missing: names of members that had not come, or had calls in flight.
        lost: names of members that were left out.
        left_s: seconds that are left for calls in flight.
    """

    phase: Phase
    is_late: bool
    missing: tuple[str, ...]
    lost: tuple[str, ...]
    left_s: float


class StartedCalls(Protocol):
    """The calls of this worker over one link."""

    @property
    def started(self) -> int:
        """How many have ever been sent."""

    def __len__(self) -> int: ...


class CallingLink(MemberLink, Protocol):
    """A link, and the calls over it."""

    @property
    def pending(self) -> StartedCalls:
        """The calls that this worker has made over it."""


class CallingPeers(Peers, Protocol):
    """The workers that this one knows, and the calls to them."""

    @property
    def links(self) -> Sequence[CallingLink]:
        """All that are open."""


class GracefulShutdown:
    """Ends a worker together with the others."""

    def __init__(
        self,
        identity: Identity,
        scheduler: Scheduler,
        peers: CallingPeers,
        rounds: RoundService,
        is_active: Callable[[], bool],
    ) -> None:
        """Prepare.

        Args:
            identity: who ends.
            scheduler: has the time.
            peers: the others.
            rounds: of this worker.
            is_active: returns whether the worker serves calls, or begins some.
        """
        self._scheduler = scheduler
        self._peers = peers
        self._rounds = rounds
        self._is_active = is_active
        rank, size = identity.rank, identity.world_size
        self.has_group = 0 <= rank < size
        self._changed = asyncio.Event()
        # All that were seen: ended ones count, too.
        self._links: dict[CallingLink, None] = {}
        self._gone: set[int] = set()  # they may be back
        if self.has_group:
            self.machine = Termination(rank, size, rounds.machine)
            rounds.waves = self

    async def wait(
        self, timeout_s: float | None, drain_timeout_s: float
    ) -> ShutdownReport:
        """Wait until all have come here and no call is in flight.

        Args:
            timeout_s: for all of it; None is no limit.
            drain_timeout_s: for the calls in flight, once all have come.

        Cancellation:
            This worker takes part no more; its end tells the others.
        """
        self.machine.enter()
        now_s = self._scheduler.loop.time
        end_s = None if timeout_s is None else now_s() + timeout_s
        try:
            limit_s = await self._until_over(end_s, drain_timeout_s)
        finally:
            self._links.clear()
        left_s = drain_timeout_s if limit_s is None else limit_s - now_s()
        return self._report(end_s is not None and now_s() >= end_s, max(left_s, 0.0))

    async def _until_over(
        self, end_s: float | None, drain_timeout_s: float
    ) -> float | None:
        """Go through the waves; return when it must be over, if that is known."""
        machine, limit_s = self.machine, end_s
        while not self._is_over:
            payload = await self._payload(limit_s)
            if payload is None:
                break
            is_gathering = machine.phase is Phase.GATHERING
            try:
                await self._wave(payload, limit_s)
            except TimeoutError:
                break
            if is_gathering and machine.phase is Phase.DRAINING:
                drained_s = self._scheduler.loop.time() + drain_timeout_s
                limit_s = drained_s if end_s is None else min(end_s, drained_s)
        return limit_s

    async def _wave(self, payload: bytes, limit_s: float | None) -> None:
        """Come to one wave.

        Raises:
            TimeoutError: it is not over, but the time is.
        """
        venue = self._rounds.venue(self.machine.key)
        for rank in self._gone.intersection(venue.series.neighbours):
            venue.messenger.connect(rank, was_seen_going=True)
        try:
            await venue.come(payload, limit_s)
            self.machine.look()
            self._on_change()
            self._rounds.flush()
        finally:
            venue.let_go()

    async def _payload(self, limit_s: float | None) -> bytes | None:
        """Return what this worker brings to the next wave once it can come to it.

        Returns:
            None if it cannot in time.
        """
        pause_s, now_s = LOOK_FIRST_S, self._scheduler.loop.time
        while not self._is_over:
            self._changed.clear()
            was_busy = self._is_busy()
            # A function that ended in a thread may have left a call for this turn of
            # the loop, to be started after its own answer was sent.
            await asyncio.sleep(0)
            busy = was_busy or self._is_busy()
            payload = self.machine.come(busy=busy, started=self._count_started())
            if payload is not None:
                return payload
            if limit_s is not None and now_s() >= limit_s:
                break
            await self._wait_change(pause_s, limit_s)
            pause_s = min(2 * pause_s, LOOK_MAX_S)
        return None

    async def _wait_change(self, patience_s: float, limit_s: float | None) -> None:
        """Wait until something has changed, or for so long."""
        end_s = self._scheduler.loop.time() + patience_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(
                end_s if limit_s is None else min(end_s, limit_s)
            ):
                await self._changed.wait()

    @property
    def _is_over(self) -> bool:
        return self.machine.is_over or self._rounds.is_closed

    def _is_busy(self) -> bool:
        if self._is_active():
            return True
        lost = {name_of(self._peers, rank) for rank in self.machine.lost}
        # A member that is left out may still have calls on their way to us.
        return any(
            len(link.pending) or link.peer.name in lost for link in self._peers.links
        )

    def _count_started(self) -> int:
        self._links.update(dict.fromkeys(self._peers.links))
        return sum(link.pending.started for link in self._links)

    def on_word(self, key: Key, word: Word) -> None:
        """A member has spoken of a wave."""
        self.machine.hear(key, word)
        self._on_change()

    def on_unreachable(self, rank: int, reason: str) -> None:
        """A member to whom this one would speak cannot be reached."""
        self.machine.lose((rank,), f"rank {rank} is gone: {reason}")
        self._on_change()

    def on_left_out(self, rank: int) -> None:
        """A member says that it goes on without this worker."""
        self.machine.hear_left_out(rank)
        self._on_change()

    def _on_change(self) -> None:
        """Tell members that are left out, if there is a way; look what is next."""
        for rank in self.machine.untold:
            with contextlib.suppress(UnknownWorkerError):
                link = self._peers.find(rank).link
                if link is not None:
                    link.tell(LeftOutNotice(link.peer.incarnation), at_once=True)
        self.machine.untold.clear()
        self._changed.set()

    def on_peer_lost(self, rank: int) -> None:
        """Look, before it is waited for, whether it is back.

        A wave that waits for it has failed already.
        """
        self._gone.add(rank)

    def _report(self, is_late: bool, left_s: float) -> ShutdownReport:  # noqa: FBT001
        machine, name = self.machine, self._rounds.name_of
        missing = [] if machine.is_over else machine.missing
        return ShutdownReport(
            phase=machine.phase,
            is_late=is_late and not machine.is_over,
            missing=tuple(map(name, missing)),
            lost=tuple(map(name, sorted(machine.lost))),
            left_s=left_s,
        )
