"""Graceful shutdown: the group ends once nothing is in flight anywhere.

`machine.termination` decides, by waves that are rounds.  This module provides its
inputs: whether this worker is busy, and how many calls it has started.  Both are read
when a wave needs them, so that they cost nothing per call.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from asyncrpc.core.barriers.machine.termination import Phase, Termination
from asyncrpc.core.barriers.messages import LeftOutNotice, SeriesNotice
from asyncrpc.core.barriers.service import BarrierParticipant, BarrierService
from asyncrpc.core.links.directory import Directory
from asyncrpc.core.links.link import Link
from asyncrpc.core.loop.waits import WaitDescription, WaitKind, does, waits
from asyncrpc.core.members import UNKNOWN_INCARNATION
from asyncrpc.core.membership.machine.membership import (
    Membership,
)
from asyncrpc.core.membership.machine.records import (
    Record,
)
from asyncrpc.errors import UnknownWorkerError

# The pauses after which a busy worker checks again whether it is idle: no event tells
# it of the end of each call.
END_OF_GROUP: Final = "the end of the group"  # a label, see `waits.does`
LOOK_FIRST_S: Final = 0.001
LOOK_MAX_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class ShutdownReport:
    """The outcome of the wait for the group."""

    phase: Phase  # that the group has reached
    is_late: bool  # whether the timeout of the whole wait has passed
    missing: tuple[str, ...]  # names of members that had not come, or had calls
    lost: tuple[str, ...]  # names of members that were left out
    left_s: float  # for calls in flight


class GracefulShutdown:
    """Ends a worker together with the others."""

    def __init__(
        self,
        barriers: BarrierService,
        peers: Directory,
        *,
        is_active: Callable[[], bool],
        members: Callable[[], Membership],
    ) -> None:
        self._barriers = barriers
        self._peers = peers
        self._identity = barriers.identity
        self._is_active = is_active
        self._members = members
        self.began_s = 0.0  # when this worker asked for the end, in the loop's time
        self.participant: BarrierParticipant | None = None  # in the wave it has come to
        self._changed = asyncio.Event()
        # All links seen so far: calls of ended links count as well.
        self._links: dict[Link, None] = {}
        self._gone: set[int] = set()  # ranks that may have been restarted
        barriers.shutdown = self

    @property
    def has_group(self) -> bool:
        """Whether this worker has a rank; a running group may give it one."""
        return 0 <= self._identity.rank < self._identity.world_size

    @functools.cached_property
    def machine(self) -> Termination:
        """The machine of the end; only for a worker with a rank."""
        barriers = self._barriers
        return Termination(self._identity.rank, barriers.size, barriers.table)

    @property
    def _loop(self) -> asyncio.AbstractEventLoop:
        return self._barriers.scheduler.loop

    @property
    def has_begun(self) -> bool:
        """Whether this worker has asked for the end of the group."""
        return self.has_group and self.machine.phase is not Phase.BEFORE

    @does(lambda _: END_OF_GROUP)
    @waits(lambda at: at["self"].wait_now())
    async def wait(
        self, timeout_s: float | None, drain_timeout_s: float
    ) -> ShutdownReport:
        """Wait until all have come here and no call is in flight."""
        self._note_own_life()
        self.machine.enter()
        self.began_s = self._loop.time()
        end_s = None if timeout_s is None else self.began_s + timeout_s
        try:
            limit_s = await self._until_over(end_s, drain_timeout_s)
        finally:
            self._links.clear()
        left_s = drain_timeout_s if limit_s is None else limit_s - self._loop.time()
        machine, name = self.machine, self._barriers.name_of
        return ShutdownReport(
            phase=machine.phase,
            # Not by the present time: a timer may be a little early.
            is_late=end_s is not None and limit_s == end_s and not self._is_over,
            missing=tuple(map(name, [] if machine.is_over else machine.missing)),
            lost=tuple(map(name, sorted(machine.lost))),
            left_s=max(left_s, 0.0),
        )

    def wait_now(self) -> WaitDescription:
        """Describe what it waits for: the others, or calls here."""
        participant = self.participant
        if participant is not None and participant.series.is_waiting:
            return WaitDescription(
                WaitKind.ROUND,
                participant.label,
                members=participant.members,
                needs=(END_OF_GROUP,),
                since_s=self.began_s,
            )
        return WaitDescription(
            WaitKind.IN_FLIGHT, "calls in flight", since_s=self.began_s
        )

    async def _until_over(
        self, end_s: float | None, drain_timeout_s: float
    ) -> float | None:
        """Go through the waves; return the time limit, if there is one yet."""
        machine, limit_s = self.machine, end_s
        while not self._is_over:
            is_marked = await self._mark(limit_s)
            is_gathering = machine.phase is Phase.GATHERING
            if is_gathering and limit_s != end_s:  # again: a member was restarted
                limit_s = end_s
            elif is_marked is None:
                break
            if is_marked is None:
                continue
            try:
                await self._wave(limit_s, is_marked=is_marked)
            except TimeoutError:
                break
            if is_gathering and machine.phase is Phase.DRAINING:
                drained_s = self._loop.time() + drain_timeout_s
                limit_s = drained_s if end_s is None else min(end_s, drained_s)
        return limit_s

    async def _wave(self, limit_s: float | None, *, is_marked: bool) -> None:
        """Come to one wave; raise TimeoutError if it is not over by `limit_s`."""
        participant = self._barriers.participant(self.machine.key)
        for rank in self._gone.intersection(participant.series.neighbours):
            participant.connect(rank, 0.0)  # it was seen going
        self.participant = participant
        try:
            await participant.join(limit_s, is_marked=is_marked)
            self.machine.look()
            self._on_change()
            self._barriers.flush()
        finally:
            self.participant = None
            participant.series.let_go()

    async def _mark(self, limit_s: float | None) -> bool | None:
        """Return the mark for the next wave, once idle; None: not before `limit_s`."""
        pause_s, now_s = LOOK_FIRST_S, self._loop.time
        while not self._is_over:
            self._changed.clear()
            was_busy = self._is_busy()
            # A function that ended in a thread may have left a call for this turn of
            # the loop, to be started after its own answer was sent.
            await asyncio.sleep(0)
            busy = was_busy or self._is_busy()
            is_marked = self.machine.join(busy=busy, started=self._count_started())
            if is_marked is not None:
                return is_marked
            if limit_s is not None and now_s() >= limit_s:
                break
            end_s = now_s() + pause_s
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(
                    end_s if limit_s is None else min(end_s, limit_s)
                ):
                    await self._changed.wait()
            pause_s = min(2 * pause_s, LOOK_MAX_S)
        return None

    @property
    def _is_over(self) -> bool:
        return self.machine.is_over or self._barriers.is_closed

    def _is_busy(self) -> bool:
        if self._is_active():
            return True
        lost = set(map(self._barriers.name_of, self.machine.lost))
        # A member that is left out may still have calls on their way to this worker.
        return any(
            len(link.pending) or link.peer.name in lost for link in self._peers.links
        )

    def _count_started(self) -> int:
        self._links.update(dict.fromkeys(self._peers.links))
        return sum(link.pending.started for link in self._links)

    def on_notice(self, notice: SeriesNotice) -> None:
        """Take the message of a member about a wave."""
        self._note_own_life()
        self.machine.receive(notice)
        self._on_change()

    def on_unreachable(self, rank: int, reason: str) -> None:
        """Record as lost a member that cannot be reached."""
        self.machine.lose((rank,), f"rank {rank} is gone: {reason}")
        self._on_change()

    def on_left_out(self, rank: int) -> None:
        """Record that a member goes on without this worker."""
        self.machine.on_left_out(rank)
        self._on_change()

    def _on_change(self) -> None:
        """Tell reachable members that they are left out; wake the wait."""
        for rank in self.machine.untold:
            with contextlib.suppress(UnknownWorkerError):
                link = self._peers.find(rank).link
                # A later life may be there already, which is not left out.
                record = self._members().holder_of(rank)
                if link is not None and (
                    record is None
                    or record.incarnation
                    in (UNKNOWN_INCARNATION, link.peer.incarnation)
                ):
                    link.tell(LeftOutNotice(link.peer.incarnation), at_once=True)
        self.machine.untold.clear()
        self._changed.set()

    def on_life(self, record: Record) -> None:
        """Record a member that has come: it may be a later life of a lost one."""
        if self.has_group and not self._members().is_static:
            self.machine.on_life(record.member.rank, record.generation)
            self._on_change()
            self._barriers.flush()

    def _note_own_life(self) -> None:
        """Take note of which life of its name this worker is: others may have said."""
        self.on_life(self._members().me)

    def on_peer_lost(self, rank: int) -> None:
        """Record a lost peer: the next wave checks first whether it was restarted.

        A wave that waits for the peer has failed already.
        """
        self._gone.add(rank)
