"""When a group has nothing left to do: termination detection, without a centre.

The members go through waves.  In each, every member says once whether it has started a
call, or was at work, since it said so in the wave before; and it says so only when it
is idle: it serves no call and waits for none.  A wave in which none has is the proof:

    Let T be the moment at which the last member spoke in the wave before.  Each member
    was idle when it spoke then, before T, and when it speaks now, after T: for no
    member begins a wave before all have spoken in the one before.  In between it
    started nothing.  So a call under way at T was started by a member before it spoke;
    but then it was waited for, and the member was not idle.

Being at rest is stable: a member that has seen it may tell others, and they may leave.

All members come to the first wave at once, idle or not.  So it ends when all have asked
for the end, and until then no member is hurried.

A lost member is left out: a member that learns of a loss adds it to those it knows, and
begins again.  As losses only grow, and travel with every message, all members that are
left come to count the same ones.  A member that was wrongly believed lost learns of it
in the same way, and must end alone.

Not known here: calls.  The service says whether it is busy and how many calls it has
ever started.  Source: Mattern, "Algorithms for distributed termination detection",
1987 (the four counters), with its second pair of counters kept at each member.
"""

from __future__ import annotations

import enum

from asyncrpc.runtime.rounds.machine.gathering import Gathering, ranks_of


class Phase(enum.Enum):
    """How far the end has come, as one member sees it."""

    BEFORE = "this worker has not asked for the end"
    GATHERING = "not all have asked for the end"
    DRAINING = "all have asked; calls are in flight, or may be"
    ENDED = "nothing is in flight anywhere"
    EXCLUDED = "the others believe this worker to be lost"


class Termination:
    """One member of a group that ends.

    Attributes:
        phase: how far it has come.
        lost: bits of the ranks that are left out.
        wave: number of the present wave, from 0; anew after each loss.
        beginning: how often it has begun; grows with each loss.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.phase = Phase.BEFORE
        self.lost = 0
        self.wave = 0
        self.beginning = 0
        self._rank = rank
        self._size = size
        self._started = -1  # calls, when this member spoke last; -1: it was busy
        self._owed: list[int] = []  # who waits for the word that a wave has ended
        self._gathering = self._anew()

    @property
    def is_over(self) -> bool:
        """Return whether this member need not wait any more."""
        return self.phase in (Phase.ENDED, Phase.EXCLUDED)

    @property
    def must_speak(self) -> bool:
        """Return whether the present wave waits for this member."""
        is_in = self.phase in (Phase.GATHERING, Phase.DRAINING)
        return is_in and not self._gathering.has_come

    @property
    def missing(self) -> list[int]:
        """The ranks that the present wave waits for, as far as is known here."""
        return self._gathering.missing

    @property
    def known(self) -> int:
        """Bits of the ranks that have spoken in the present wave."""
        return self._gathering.known

    @property
    def marked(self) -> int:
        """Return the bits of members that were at work since the wave before."""
        return self._gathering.marked

    def enter(self) -> None:
        """This worker asks for the end."""
        if self.phase is Phase.BEFORE:
            self.phase = Phase.GATHERING

    def speak(self, *, busy: bool, started: int) -> None:
        """Speak in the present wave, if this member can.

        Args:
            busy: whether a call is served here, or waited for.
            started: how many calls this member has ever started.
        """
        if not self.must_speak or (busy and self.wave > 0):
            return
        marked = busy or started != self._started or not self.wave
        self._started = -1 if busy else started
        self._gathering.come(marked=marked)
        self._go_on()

    def hear(self, lost: int, wave: int, known: int, marked: int) -> bool:
        """Take another member's message.

        Returns:
            Whether it does not know what is known here, and must be told.
        """
        if self.is_over:
            return True
        self._lose(lost)
        if self.is_over or lost != self.lost or wave < self.wave:
            return True
        if wave > self.wave and self.phase is not Phase.BEFORE:
            self._begin(wave)  # all have spoken in ours, or none would be in that one
        if wave == self.wave:
            self._gathering.merge(known, marked)
            self._go_on()
        return False

    def hear_end(self) -> None:
        """Another member has seen that nothing is in flight anywhere."""
        if self.phase in (Phase.GATHERING, Phase.DRAINING):
            self.phase = Phase.ENDED

    def on_lost(self, rank: int) -> None:
        """A worker is gone: go on without it."""
        if 0 <= rank < self._size and rank != self._rank and not self.is_over:
            self._lose(1 << rank)

    def due(self) -> list[int]:
        """Return the ranks to be told now, and take it that they are."""
        if self.is_over:
            return []
        owed, self._owed = self._owed, []
        due = self._gathering.due()
        return due + [rank for rank in owed if rank not in due]

    def overdue(self) -> list[int]:
        """Return the ranks to be told after a silence, and take it that they are."""
        return [] if self.is_over else self._gathering.overdue()

    def awaited(self) -> list[int]:
        """Return the ranks whose loss must be noticed here: the wave waits for them."""
        return [] if self.is_over else self._gathering.awaited()

    @property
    def listeners(self) -> list[int]:
        """Return the ranks that this member informs; they must learn of the end."""
        return self._gathering.listeners

    def _lose(self, lost: int) -> None:
        lost &= (1 << self._size) - 1
        if not lost & ~self.lost:
            return
        self.lost |= lost
        if self.lost >> self._rank & 1:
            self.phase = Phase.EXCLUDED
            return
        self.beginning += 1
        self.wave = 0
        self._owed = []
        self._gathering = self._anew()

    def _go_on(self) -> None:
        """End the wave if all have spoken in it."""
        if not self._gathering.is_whole:
            return
        if self.wave and not self._gathering.marked:
            self.phase = Phase.ENDED
        else:
            self._begin(self.wave + 1)

    def _begin(self, wave: int) -> None:
        self.phase = Phase.DRAINING
        self.wave = wave
        # A message of this wave tells them that the one before has ended.
        self._owed = self._gathering.due()
        self._gathering = self._anew()

    def _anew(self) -> Gathering:
        everyone = (1 << self._size) - 1
        return Gathering(self._rank, ranks_of(everyone & ~self.lost))
