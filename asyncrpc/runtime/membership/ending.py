"""The end of a group: a graceful shutdown waits until nothing is in flight anywhere.

`machine.termination` decides; here are its words, its connections, and what it is told:
whether this worker is busy, and how many calls it has started.  Both are read when a
wave asks for them, so that a call costs nothing more for it.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from asyncrpc.ids import WorkerId
from asyncrpc.runtime.forms import (
    COUNT,
    Methods,
    ServiceMethods,
    array,
    mask,
    nothing,
)
from asyncrpc.runtime.machine.gathering import ranks_of
from asyncrpc.runtime.machine.termination import Phase, Termination
from asyncrpc.runtime.membership.neighbours import LAST_WORD_S, STALL_S, Neighbours

if TYPE_CHECKING:
    from asyncrpc.runtime.links.link import Link
    from asyncrpc.runtime.worker import Worker

# How often a busy worker looks whether it is idle: nothing tells it of each call.
LOOK_FIRST_S: Final = 0.001
LOOK_MAX_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class Outlook:
    """How the wait for the others has ended.

    Attributes:
        phase: how far the group has come.
        is_late: whether the time given for all of it has passed.
        missing: names of those that had not come, or had calls in flight.
        lost: names of those that were left out.
        left_s: seconds that are left for calls in flight.
    """

    phase: Phase
    is_late: bool
    missing: tuple[str, ...]
    lost: tuple[str, ...]
    left_s: float


class Ending(ServiceMethods):
    """The part of a worker that ends together with the others; a `Service`."""

    name = "ending"

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.has_group = 0 <= worker.rank < worker.world_size
        self._size = worker.world_size if self.has_group else 1
        rank = worker.rank if self.has_group else 0
        self._machine = Termination(rank, self._size)
        self._neighbours = Neighbours(worker, self._say, self._on_gone)
        self._changed = asyncio.Event()
        bits = mask(self._size)
        wave = array(wave=COUNT, lost=bits, known=bits, marked=bits)
        self.requests = Methods(self.name, {})
        self.notices = Methods(
            self.name,
            {"wave": (wave, self._on_wave), "ended": (nothing, self._on_ended)},
        )
        self._links: dict[Link, None] = {}  # all that were seen: ended ones count, too
        self._gone_before: set[int] = set()  # those that may be back
        self._is_closed = False

    async def wait(self, timeout_s: float | None, drain_timeout_s: float) -> Outlook:
        """Wait until all have come here and no call is in flight.

        Args:
            timeout_s: for all of it; None is no limit.
            drain_timeout_s: for the calls in flight, once all have come.

        Cancellation:
            This worker takes part no more; its end tells the others.
        """
        self._machine.enter()
        for rank in self._gone_before:
            self._neighbours.watch(rank, was_seen_going=True)
        now_s = self._worker.loop.time
        end_s = None if timeout_s is None else now_s() + timeout_s
        try:
            limit_s = await self._until_over(end_s, drain_timeout_s)
            if self._machine.phase is Phase.ENDED:
                await self._tell_end()
        finally:
            self._neighbours.forget()
            self._links.clear()
        left_s = drain_timeout_s if limit_s is None else limit_s - now_s()
        return self._outlook(end_s is not None and now_s() >= end_s, max(left_s, 0.0))

    async def _until_over(
        self, end_s: float | None, drain_timeout_s: float
    ) -> float | None:
        """Go through the waves; return when it must be over, if that is known."""
        machine, now_s = self._machine, self._worker.loop.time
        limit_s, is_draining = end_s, False
        heard_s, is_silent, pause_s = now_s(), False, LOOK_FIRST_S
        while not (machine.is_over or self._is_closed):
            self._changed.clear()
            if await self._speak():
                pause_s = LOOK_FIRST_S
                continue
            for rank in machine.due():
                self._neighbours.tell(rank)
            if machine.phase is Phase.DRAINING and not is_draining:
                is_draining = True
                drained_s = now_s() + drain_timeout_s
                limit_s = drained_s if end_s is None else min(end_s, drained_s)
            if limit_s is not None and now_s() >= limit_s:
                break
            patience_s = pause_s if machine.must_speak else None
            if not is_silent:
                patience_s = min(patience_s or STALL_S, STALL_S)
            if await self._hear(patience_s, limit_s):
                heard_s, is_silent = now_s(), False
            elif not is_silent and now_s() >= heard_s + STALL_S:
                is_silent = True
                self._on_silence()
            pause_s = min(2 * pause_s, LOOK_MAX_S)
        return limit_s

    async def _hear(self, patience_s: float | None, limit_s: float | None) -> bool:
        """Wait until something has changed; False after so much silence."""
        end_s = None if patience_s is None else self._worker.loop.time() + patience_s
        if limit_s is not None:
            end_s = limit_s if end_s is None else min(end_s, limit_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(end_s):
                await self._changed.wait()
        return self._changed.is_set()

    async def _speak(self) -> bool:
        """Speak if the wave waits for it and this worker can; say whether it has."""
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
            self._neighbours.tell(rank)
        for rank in self._machine.awaited():
            self._neighbours.watch(rank)

    def _is_busy(self) -> bool:
        worker = self._worker
        if worker.active or worker.beginning:
            return True
        lost = set(map(self._neighbours.name_of, ranks_of(self._machine.lost)))
        # One that is left out may have more calls on their way to us while it is here.
        return any(
            len(link.pending) or link.peer.name in lost
            for link in worker.directory.links
        )

    def _count_started(self) -> int:
        self._links.update(dict.fromkeys(self._worker.directory.links))
        return sum(link.pending.started for link in self._links)

    def _on_ended(self, link: Link, _value: None) -> None:
        self._neighbours.check_rank(link)
        self._machine.hear_end()
        self._changed.set()

    def _on_wave(self, link: Link, value: list[Any]) -> None:
        self._neighbours.check_rank(link)
        wave, *masks = value[:4]
        lost, known, marked = (int.from_bytes(mask, "little") for mask in masks)
        beginning = self._machine.beginning
        is_behind = self._machine.hear(lost, wave, known, marked)
        if is_behind and not self._is_closed:
            self._say(link)
        self._tell_loss(beginning)
        self._changed.set()

    def on_peer_lost(self, peer: WorkerId, reason: str) -> None:
        """Go on without it, if the end has begun; else see then whether it is back."""
        rank = self._neighbours.rank_of(peer.name)
        if not 0 <= rank < self._size:
            return
        if self._machine.phase is Phase.BEFORE:
            self._gone_before.add(rank)
        else:
            self._on_gone(rank, reason)

    async def close(self) -> None:
        """Let go of whoever waits here."""
        self._is_closed = True
        self._changed.set()

    def _on_gone(self, rank: int, _reason: str) -> None:
        beginning = self._machine.beginning
        self._machine.on_lost(rank)
        self._tell_loss(beginning)
        self._changed.set()

    def _tell_loss(self, beginning: int) -> None:
        """If it has begun anew since, tell all: also whoever is believed lost."""
        if self._machine.beginning != beginning:
            for link in self._others():
                self._say(link)

    def _others(self) -> list[Link]:
        name = self._worker.name
        return [one for one in self._worker.directory.links if one.peer.name != name]

    async def _tell_end(self) -> None:
        """Tell everyone who is connected, and those who may rely on this worker."""
        for rank in self._machine.listeners:
            self._neighbours.tell(rank)
        for link in self._others():
            self._say(link)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORD_S):
                await self._neighbours.settle()

    def _say(self, link: Link) -> None:
        """Say what is known here."""
        machine = self._machine
        if machine.phase is Phase.ENDED:
            link.notify(self.name, "ended", None)
            return
        masks = (machine.lost, machine.known, machine.marked)
        nbytes = (self._size + 7) // 8
        words = [mask.to_bytes(nbytes, "little") for mask in masks]
        link.notify(self.name, "wave", [machine.wave, *words])

    def _outlook(self, is_late: bool, left_s: float) -> Outlook:  # noqa: FBT001
        machine, name = self._machine, self._neighbours.name_of
        return Outlook(
            phase=machine.phase,
            is_late=is_late and not machine.is_over,
            missing=tuple(map(name, () if machine.is_over else machine.missing)),
            lost=tuple(map(name, ranks_of(machine.lost))),
            left_s=left_s,
        )
