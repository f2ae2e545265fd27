"""When a group has nothing left to do: termination detection, in waves.

A wave is a round of all members that are left.  In each, every member brings a mark if
it has started a call, or was at work, since it brought something to the wave before;
and it comes only when it is idle: it serves no call and waits for none.  A wave to
which nobody brings a mark is the proof:

    Let T be the moment at which the last member came to the wave before.  Each member
    was idle when it came then, before T, and when it comes now, after T: for no member
    passes a round before all have come to it.  In between it started nothing.  So a
    call under way at T was started by a member before it came; but then it was waited
    for, and the member was not idle.

To its first wave, and to the first after a failed one, a member comes at once, idle or
not, and with a mark.  So the first is over when all have asked for the end, and until
then no member is hurried.

A lost member is left out: those that are left have another series.  A member that
learns of a loss fails the wave of the series that it is in, which tells the others, and
goes on in the next.  What has been lost only grows, and each series names those that it
does without; so all members that are left come to the same one.  A member that was
wrongly believed lost learns of it in the same way, or is told, and must end alone.

Not known here: calls.  The service says whether it is busy and how many calls it has
ever started.  Source: Mattern, "Algorithms for distributed termination detection",
1987 (the four counters), with its second pair of counters kept at each member.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Final

from asyncrpc.runtime.rounds.machine.series import Series
from asyncrpc.runtime.rounds.machine.table import Rounds
from asyncrpc.runtime.rounds.machine.words import (
    MISSING_MAX,
    Blame,
    Failure,
    Key,
    Purpose,
    RoundFailed,
    Word,
)

MARK: Final = b"\1"


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
        lost: the ranks that are left out.
        untold: those of them that are yet to be told so, if they can be reached.
        is_first: whether the next wave is its first, or the first after a failed one.
    """

    def __init__(self, rank: int, size: int, rounds: Rounds) -> None:
        """Begin before the end.

        Args:
            rank: of this worker.
            size: of its group.
            rounds: of this worker.
        """
        self.phase = Phase.BEFORE
        self.lost: set[int] = set()
        self.untold: set[int] = set()
        self._rank = rank
        self._size = size
        self._rounds = rounds
        self.is_first = True
        self._started = -1  # calls, when this member came last; -1: it was busy
        self._wave: Series | None = None  # that it has come to last, until it is over

    @property
    def is_over(self) -> bool:
        """Return whether this member need not wait any more."""
        return self.phase in (Phase.ENDED, Phase.EXCLUDED)

    @property
    def key(self) -> Key:
        """What names the series of all members that are left."""
        left = (rank for rank in range(self._size) if rank not in self.lost)
        return Key(Purpose.END, "", tuple(left) if self.lost else None)

    @property
    def series(self) -> Series:
        """Return the series whose waves this member comes to."""
        return self._rounds.series(self.key)

    @property
    def missing(self) -> list[int]:
        """The ranks that the present wave waits for, as far as is known here."""
        series = self.series
        if series.is_waiting or series.latest > series.number:
            return series.missing
        return list(series.ranks)  # nobody is known to have come

    def enter(self) -> None:
        """This worker asks for the end."""
        if self.phase is Phase.BEFORE:
            self.phase = Phase.GATHERING

    def come(self, *, busy: bool, started: int) -> bytes | None:
        """Say what this member brings to the next wave, if it can come to it.

        Args:
            busy: whether a call is served here, or waited for.
            started: how many calls this member has ever started.

        Returns:
            The payload, with which it must come now; None: it cannot yet.
        """
        if self.is_over or (busy and not self.is_first):
            return None
        is_marked = busy or started != self._started or self.is_first
        self._started = -1 if busy else started
        self.is_first = False
        self._wave = self.series
        return MARK if is_marked else b""

    def look(self) -> None:
        """See how the wave has ended that this member has come to, if it has."""
        wave = self._wave
        if wave is None or wave.is_waiting:
            return
        self._wave, failure = None, wave.failure
        if failure is not None:
            self.is_first = True
            if failure.blame is Blame.LOST:
                self.lose(failure.missing, failure.problem)
        elif not self.is_over:
            is_marked = any(wave.payloads)
            self.phase = Phase.DRAINING if is_marked else Phase.ENDED

    def hear(self, key: Key, word: Word) -> None:
        """Another member has spoken of a wave: see whom it does without."""
        if key.replicas is not None:
            self.lose(set(range(self._size)).difference(key.replicas), "says another")
        if isinstance(word, RoundFailed) and word.failure.blame is Blame.LOST:
            self.lose(word.failure.missing, word.failure.problem)
        series = self._rounds.series(key)
        unknown = self.lost.intersection(series.ranks)
        if unknown:  # to whoever spoke
            ranks = tuple(sorted(unknown))[:MISSING_MAX]
            failure = Failure(Blame.LOST, "the others go on without these", ranks)
            series.fail_ahead(series.latest, failure)

    def hear_left_out(self, rank: int) -> None:
        """A member says that it goes on without this one."""
        if 0 <= rank < self._size:
            self.lose((self._rank,), "it is left out")

    def lose(self, ranks: Iterable[int], problem: str) -> None:
        """Members are gone: go on without them."""
        self.look()  # whoever has passed a wave does not fail it any more
        new = set(ranks).intersection(range(self._size)).difference(self.lost)
        if self.is_over or not new:
            return
        self.is_first = True
        if self._rank in new:
            self.phase = Phase.EXCLUDED
            if self._wave is not None:
                problem = "the others go on without this one"
                self._wave.fail(Failure(Blame.GAVE_UP, problem))
            return
        series = None if self.phase is Phase.BEFORE else self.series
        self.lost |= new
        self.untold |= new
        if series is None:
            return
        failure = Failure(Blame.LOST, problem, tuple(sorted(new))[:MISSING_MAX])
        if series.is_waiting:
            series.fail(failure)
        else:
            self._rounds.decline(series, failure)
