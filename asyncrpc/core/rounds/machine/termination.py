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

from asyncrpc.core.rounds.machine.messages import (
    MISSING_MAX,
    Blame,
    Failure,
    Key,
    Purpose,
    RoundFailed,
    RoundMessage,
)
from asyncrpc.core.rounds.machine.series import Series
from asyncrpc.core.rounds.machine.table import Rounds

LIVES_MAX: Final = 100  # restarted members; the key of a series names them


class Phase(enum.Enum):
    """The phase of the group's end, as one member sees it."""

    BEFORE = "this worker has not asked for the end"
    GATHERING = "not all have asked for the end"
    DRAINING = "all have asked; calls are in flight, or may be"
    ENDED = "nothing is in flight anywhere"
    EXCLUDED = "the others believe this worker to be lost"


class Termination:
    """One member of a group that ends.

    Attributes:
        phase: the phase of the end.
        lost: the ranks that are left out.
        lives: which life of a member takes part, by rank, if it is not the first.
        untold: the lost ranks that still get a `left_out` notice, if reachable.
        is_first: whether the next wave is the member's first, or follows a failed one.
    """

    def __init__(self, rank: int, size: int, rounds: Rounds) -> None:
        self.phase = Phase.BEFORE
        self.lost: set[int] = set()
        self.lives: dict[int, int] = {}
        self.untold: set[int] = set()
        self._rank = rank
        self._size = size
        self._rounds = rounds
        self.is_first = True
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
        return self._rounds.series(self.key)

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

    def receive(self, key: Key, message: RoundMessage) -> None:
        """Take the message of another member about a wave: it may name lost members."""
        lives = lives_in(key)

        def present(ranks: Iterable[int]) -> set[int]:
            """Return the ranks of which the sender means the present life."""
            return {one for one in ranks if lives.get(one, 1) == self.lives.get(one, 1)}

        if key.replicas is not None:
            lost = set(range(self._size)).difference(key.replicas)
            self.lose(present(lost), "another member reported the loss")
        if isinstance(message, RoundFailed) and message.failure.blame is Blame.LOST:
            self.lose(present(message.failure.missing), message.failure.problem)
        series = self._rounds.series(key)
        unknown = present(self.lost.intersection(series.ranks))
        if unknown:  # to the sender
            ranks = tuple(sorted(unknown))[:MISSING_MAX]
            failure = Failure(Blame.LOST, "the others go on without these", ranks)
            series.fail_ahead(series.latest, failure)

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
        if series is not None and series.is_waiting:
            problem = f"{self._rounds.who(rank)} has been restarted"
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
        if series is None:
            return
        failure = Failure(Blame.LOST, problem, tuple(sorted(new))[:MISSING_MAX])
        if series.is_waiting:
            series.fail(failure)
        else:
            self._rounds.abort(series, failure)


def lives_in(key: Key) -> dict[int, int]:
    """Return the lives that the key of a series names, by rank."""
    found: dict[int, int] = {}
    for part in key.tag.split(","):
        rank, _, life = part.partition(":")
        if rank.isdecimal() and life.isdecimal():
            found[int(rank)] = int(life)
    return found
