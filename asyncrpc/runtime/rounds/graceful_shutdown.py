"""Graceful shutdown: the group ends once nothing is in flight anywhere.

`machine.termination` decides; here are its messages, its connections, and its inputs:
whether this worker is busy, and how many calls it has started.  Both are read when a
wave asks for them, so that they cost a call nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from asyncrpc.ids import WorkerId
from asyncrpc.runtime.forms import (
    COUNT,
    Methods,
    ServiceMethods,
    array,
    mask,
    nothing,
)
from asyncrpc.runtime.membership.ports import MemberLink, Peers
from asyncrpc.runtime.ports import Identity, PeerLink, Scheduler
from asyncrpc.runtime.rounds.machine.gathering import ranks_of
from asyncrpc.runtime.rounds.machine.termination import Phase, Termination
from asyncrpc.runtime.rounds.messenger import (
    LAST_MESSAGE_S,
    STALL_S,
    PeerMessenger,
)

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


class GracefulShutdown(ServiceMethods):
    """Ends a worker together with the others; a `Service`."""

    name = "ending"

    def __init__(
        self,
        identity: Identity,
        scheduler: Scheduler,
        peers: CallingPeers,
        is_active: Callable[[], bool],
    ) -> None:
        """Prepare.

        Args:
            identity: who ends.
            scheduler: has the time, and runs the dials.
            peers: the others.
            is_active: returns whether the worker serves calls, or begins some.
        """
        self._identity = identity
        self._scheduler = scheduler
        self._peers = peers
        self._is_active = is_active
        rank, size = identity.rank, identity.world_size
        self.has_group = 0 <= rank < size
        self._size = size if self.has_group else 1
        self._machine = Termination(rank if self.has_group else 0, self._size)
        self._messenger = PeerMessenger(
            identity, scheduler, peers, self._write, self._on_gone
        )
        self._changed = asyncio.Event()
        bits = mask(self._size)
        wave = array(wave=COUNT, lost=bits, known=bits, marked=bits)
        self.requests = Methods(self.name, {})
        self.notices = Methods(
            self.name,
            {"wave": (wave, self._on_wave), "ended": (nothing, self._on_ended)},
        )
        self._links: dict[
            CallingLink, None
        ] = {}  # all that were seen: ended ones count, too
        self._gone_before: set[int] = set()  # they may be back
        self._is_closed = False

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
        self._machine.enter()
        for rank in self._gone_before:
            self._messenger.connect(rank, was_seen_going=True)
        now_s = self._scheduler.loop.time
        end_s = None if timeout_s is None else now_s() + timeout_s
        try:
            limit_s = await self._until_over(end_s, drain_timeout_s)
            if self._machine.phase is Phase.ENDED:
                await self._send_end()
        finally:
            self._messenger.cancel()
            self._links.clear()
        left_s = drain_timeout_s if limit_s is None else limit_s - now_s()
        return self._report(end_s is not None and now_s() >= end_s, max(left_s, 0.0))

    async def _until_over(
        self, end_s: float | None, drain_timeout_s: float
    ) -> float | None:
        """Go through the waves; return when it must be over, if that is known."""
        machine, now_s = self._machine, self._scheduler.loop.time
        limit_s, is_draining = end_s, False
        changed_s, is_silent, pause_s = now_s(), False, LOOK_FIRST_S
        while not (machine.is_over or self._is_closed):
            self._changed.clear()
            if await self._answer_wave():
                pause_s = LOOK_FIRST_S
                continue
            for rank in machine.due():
                self._messenger.send(rank)
            if machine.phase is Phase.DRAINING and not is_draining:
                is_draining = True
                drained_s = now_s() + drain_timeout_s
                limit_s = drained_s if end_s is None else min(end_s, drained_s)
            if limit_s is not None and now_s() >= limit_s:
                break
            patience_s = pause_s if machine.must_speak else None
            if not is_silent:
                patience_s = min(patience_s or STALL_S, STALL_S)
            if await self._wait_change(patience_s, limit_s):
                changed_s, is_silent = now_s(), False
            elif not is_silent and now_s() >= changed_s + STALL_S:
                is_silent = True
                self._on_silence()
            pause_s = min(2 * pause_s, LOOK_MAX_S)
        return limit_s

    async def _wait_change(
        self, patience_s: float | None, limit_s: float | None
    ) -> bool:
        """Wait until something has changed; False after so much silence."""
        end_s = None if patience_s is None else self._scheduler.loop.time() + patience_s
        if limit_s is not None:
            end_s = limit_s if end_s is None else min(end_s, limit_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(end_s):
                await self._changed.wait()
        return self._changed.is_set()

    async def _answer_wave(self) -> bool:
        """Answer a wave, if one waits for it and this worker can; return whether."""
        machine = self._machine
        if not machine.must_speak:
            return False
        was_busy = self._is_busy()
        # A function that ended in a thread may have left a call for this turn of the
        # loop, to be started after its own answer was sent.
        await asyncio.sleep(0)
        before = machine.beginning, machine.wave
        machine.speak(busy=was_busy or self._is_busy(), started=self._count_started())
        return not machine.must_speak or (machine.beginning, machine.wave) != before

    def _on_silence(self) -> None:
        for rank in self._machine.overdue():
            self._messenger.send(rank)
        for rank in self._machine.awaited():
            self._messenger.connect(rank)

    def _is_busy(self) -> bool:
        if self._is_active():
            return True
        lost = set(map(self._messenger.name_of, ranks_of(self._machine.lost)))
        # A member that is left out may still have calls on their way to us.
        return any(
            len(link.pending) or link.peer.name in lost for link in self._peers.links
        )

    def _count_started(self) -> int:
        self._links.update(dict.fromkeys(self._peers.links))
        return sum(link.pending.started for link in self._links)

    def _on_ended(self, link: PeerLink, _value: None) -> None:
        self._messenger.check_rank(link)
        self._machine.hear_end()
        self._changed.set()

    def _on_wave(self, link: PeerLink, value: list[Any]) -> None:
        self._messenger.check_rank(link)
        wave, *masks = value[:4]
        lost, known, marked = (int.from_bytes(mask, "little") for mask in masks)
        beginning = self._machine.beginning
        is_behind = self._machine.hear(lost, wave, known, marked)
        if is_behind and not self._is_closed:
            self._write(link)
        self._send_loss(beginning)
        self._changed.set()

    def on_peer_lost(self, peer: WorkerId, reason: str) -> None:
        """Go on without it, if the end has begun; else see then whether it is back."""
        rank = self._messenger.rank_of(peer.name)
        if not 0 <= rank < self._size:
            return
        if self._machine.phase is Phase.BEFORE:
            self._gone_before.add(rank)
        else:
            self._on_gone(rank, reason)

    async def close(self) -> None:
        """Let go of the tasks that wait here."""
        self._is_closed = True
        self._changed.set()

    def _on_gone(self, rank: int, _reason: str) -> None:
        beginning = self._machine.beginning
        self._machine.on_lost(rank)
        self._send_loss(beginning)
        self._changed.set()

    def _send_loss(self, beginning: int) -> None:
        """If it has begun anew since, tell all: also members believed lost."""
        if self._machine.beginning != beginning:
            for link in self._others():
                self._write(link)

    def _others(self) -> list[CallingLink]:
        name = self._identity.name
        return [one for one in self._peers.links if one.peer.name != name]

    async def _send_end(self) -> None:
        """Tell connected members, and those that may rely on this worker."""
        for rank in self._machine.listeners:
            self._messenger.send(rank)
        for link in self._others():
            self._write(link)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_MESSAGE_S):
                await self._messenger.wait_sent()

    def _write(self, link: PeerLink) -> None:
        """Write what is known here."""
        machine = self._machine
        if machine.phase is Phase.ENDED:
            link.notify(self.name, "ended", None)
            return
        masks = (machine.lost, machine.known, machine.marked)
        nbytes = (self._size + 7) // 8
        fields = [mask.to_bytes(nbytes, "little") for mask in masks]
        link.notify(self.name, "wave", [machine.wave, *fields])

    def _report(self, is_late: bool, left_s: float) -> ShutdownReport:  # noqa: FBT001
        machine, name = self._machine, self._messenger.name_of
        return ShutdownReport(
            phase=machine.phase,
            is_late=is_late and not machine.is_over,
            missing=tuple(map(name, () if machine.is_over else machine.missing)),
            lost=tuple(map(name, ranks_of(machine.lost))),
            left_s=left_s,
        )
