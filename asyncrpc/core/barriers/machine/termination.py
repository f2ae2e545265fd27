"""Termination detection of a group, in waves.

A wave is a round of all members that are not lost.  A member comes to a wave only when
it is idle: it serves no call and waits for no call.  It brings a mark if it has started
a call, or was busy, since the previous wave.  A wave without marks proves that no call
is in flight:

    Let T be the moment at which the last member came to the previous wave.  Each member
    was idle when it came to that wave, before T, and when it comes to this one, after
    T: no member passes a round before all have come to it.  In between it started no
    call.  So a call under way at T was started by a member before the member came to
    the previous wave; but then the member waited for the call, and was not idle.

A member comes to its first wave, and to the first wave after a failed one, at once,
idle or not, and with a mark.  So the first wave is over when all have asked for the
end, and until then no member needs to be idle.

Lost members are left out: the remaining members use another series.  A member that
learns of a loss fails the wave of its present series, which informs the others, and
goes on in the next series.  The set of lost members only grows, and the key of each
series contains it; so all remaining members arrive at the same series.  A live member
that was believed lost learns this in the same way, or by a `left_out` notice, and must
end alone.

A lost member may be restarted under its name: its *life* is a later one.  The
membership says so to all members.  A member that learns of it takes the new life into
the series, and waits for it as for the others, however far the end had come; a member
that has seen the end does not.  The key of a series names the lives that are not the
first, and what a message says of another life than the present one does not count.  So
all members arrive at the same series again, once all know the same lives.

This module does not know calls: the service passes in whether the worker is busy, and
how many calls it has ever started.  Source: Mattern, "Algorithms for distributed
termination detection", 1987 (the four counters), with the second pair of counters kept
at each member.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Final

from asyncrpc.core.barriers.machine.series import Series
from asyncrpc.core.barriers.machine.table import SeriesTable
from asyncrpc.core.barriers.messages import (
    MISSING_MAX,
    Blame,
    Failure,
    Key,
    Purpose,
    RoundFailed,
    SeriesNotice,
)

LIVES_MAX: Final = 100  # restarted members; the key of a series names them


class Phase(enum.Enum):
    """The phase of the group's end, as one member sees it."""

    BEFORE = "this worker has not asked for the end"
    GATHERING = "not all have asked for the end"
    DRAINING = "all have asked; calls are in flight, or may be"
    ENDED = "nothing is in flight anywhere"
    EXCLUDED = "the others believe this worker to be lost"


class Termination:
    """One member of a group that ends."""

    def __init__(self, rank: int, size: int, table: SeriesTable) -> None:
        self.phase = Phase.BEFORE
        self.lost: set[int] = set()  # ranks that are left out
        self.lives: dict[int, int] = {}  # by rank: which takes part, if not the first
        self.untold: set[int] = set()  # lost ranks that are told so, if reachable
        self.is_first = True  # the next wave: of all, or after a failed one
        self._rank = rank
        self._size = size
        self._table = table
        self._started = -1  # calls at the previous wave; -1: the member was busy
        self._wave: Series | None = None  # the present wave, until it is over

    @property
    def is_over(self) -> bool:
        """Whether this member need not wait any more."""
        return self.phase in (Phase.ENDED, Phase.EXCLUDED)

    @property
    def key(self) -> Key:
        """The key of the series of all remaining members."""
        left = (rank for rank in range(self._size) if rank not in self.lost)
        lives = ",".join(f"{rank}:{life}" for rank, life in sorted(self.lives.items()))
        return Key(Purpose.END, lives, tuple(left) if self.lost else None)

    @property
    def series(self) -> Series:
        """The series whose waves this member comes to."""
        return self._table.series(self.key)

    @property
    def missing(self) -> list[int]:
        """The ranks that are not known to have come to the present wave."""
        series = self.series
        if series.is_waiting or series.latest > series.number:
            return series.missing
        return list(series.ranks)  # no member is known to have come

    def enter(self) -> None:
        """Record that this worker asks for the end."""
        if self.phase is Phase.BEFORE:
            self.phase = Phase.GATHERING

    def join(self, *, busy: bool, started: int) -> bool | None:
        """Return this member's mark for the next wave; None: it cannot come yet."""
        if self.is_over or (busy and not self.is_first):
            return None
        is_marked = busy or started != self._started or self.is_first
        self._started = -1 if busy else started
        self.is_first = False
        self._wave = self.series
        return is_marked

    def look(self) -> None:
        """Take the outcome of the present wave, if the wave is over."""
        wave = self._wave
        if wave is None or wave.is_waiting:
            return
        self._wave, failure = None, wave.failure
        if failure is not None:
            self.is_first = True
            if failure.blame is Blame.LOST:
                self.lose(failure.missing, failure.problem)
        elif not self.is_over:
            self.phase = Phase.DRAINING if wave.is_marked else Phase.ENDED

    def receive(self, notice: SeriesNotice) -> None:
        """Take the message of another member about a wave: it may name lost members."""
        key, lives = notice.key, lives_in(notice.key)

        def present(ranks: Iterable[int]) -> set[int]:
            """Return the ranks of which the sender means the present life."""
            return {
                rank for rank in ranks if lives.get(rank, 1) == self.lives.get(rank, 1)
            }

        if key.replicas is not None:
            lost = set(range(self._size)).difference(key.replicas)
            self.lose(present(lost), "another member reported the loss")
        if isinstance(notice, RoundFailed) and notice.failure.blame is Blame.LOST:
            self.lose(present(notice.failure.missing), notice.failure.problem)
        series = self._table.series(key)
        unknown = present(self.lost.intersection(series.ranks))
        if unknown:  # to the sender
            problem = "the others go on without these"
            series.fail_round(series.latest, _loss_of(unknown, problem))

    def on_left_out(self, rank: int) -> None:
        """Record that a member goes on without this one."""
        if 0 <= rank < self._size:
            self.lose((self._rank,), "the others left it out")

    def on_life(self, rank: int, life: int) -> None:
        """Take note of a member's present life; a later one than before takes part."""
        self.look()  # a passed wave cannot fail any more
        is_later = 0 <= rank < self._size and life > self.lives.get(rank, 1)
        has_room = rank in self.lives or len(self.lives) < LIVES_MAX
        if self.is_over or not is_later or not has_room:
            return
        series = None if self.phase is Phase.BEFORE else self.series
        self.lives[rank] = life
        self.lost.discard(rank)
        self.untold.discard(rank)
        self.is_first = True
        if self.phase is Phase.DRAINING:  # the new life has not asked for the end
            self.phase = Phase.GATHERING
        if series is not None:
            problem = f"{self._table.who(rank)} has been restarted"
            series.fail(Failure(Blame.GAVE_UP, problem))

    def lose(self, ranks: Iterable[int], problem: str) -> None:
        """Go on without members that are gone."""
        self.look()  # a passed wave cannot fail any more
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
        if series is not None:
            series.fail_next(_loss_of(new, problem))


def _loss_of(ranks: Iterable[int], problem: str) -> Failure:
    return Failure(Blame.LOST, problem, tuple(sorted(ranks))[:MISSING_MAX])


def lives_in(key: Key) -> dict[int, int]:
    """Return the lives that the key of a series names, by rank."""
    lives: dict[int, int] = {}
    for part in key.tag.split(","):
        rank, _, life = part.partition(":")
        if rank.isdecimal() and life.isdecimal():
            lives[int(rank)] = int(life)
    return lives
