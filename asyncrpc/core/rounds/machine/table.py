"""All series of rounds of one worker, and deadlocks between series of one tag.

Two members that share two series R and S of one tag must come to them in the same
order.  If one member waits in R, the other in S, and each is missing in the other's
series, they wait for each other: a deadlock.  Then both rounds fail, for all members.
Every member counts both as rounds that it has come to, so that the next calls match
again.

A member that is missing in one series, and waits in another, says so.  The message is
passed through the tree until it reaches a member for which it closes the circle.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Final, TypeAlias

from asyncrpc.core.rounds.machine.messages import (
    LISTED_MAX,
    Blame,
    Failure,
    Key,
    KnownArrivals,
    Purpose,
    Replicas,
    Report,
    RoundFailed,
    RoundMessage,
    TagRound,
    WaitsElsewhere,
)
from asyncrpc.core.rounds.machine.series import Series
from asyncrpc.errors import MalformedError

Tag: TypeAlias = tuple[Purpose, str]

SERIES_MAX: Final = 4096  # that are remembered
# How far ahead of what is known a message may be: rounds of 1 ms for 50 days.  So no
# member can use up the numbers, which end at 2^63.
AHEAD_MAX: Final = 1 << 32


class Rounds:
    """All series of one worker.

    Attributes:
        outbox: series and rank for each message that is due now.
        ended: series whose round has been passed, or has failed.
    """

    def __init__(self, rank: int, size: int, name_of: Callable[[int], str]) -> None:
        self.outbox: dict[tuple[Series, int], None] = {}
        self.ended: dict[Series, None] = {}
        self._rank = rank
        self._size = size
        self._name_of = name_of
        self._all: OrderedDict[Key, Series] = OrderedDict()
        self._alike: dict[Tag, dict[Replicas, Series]] = {}  # one tag, other replicas
        self._last: dict[Tag, Series] = {}  # that this worker has come to

    def who(self, rank: int) -> str:
        """Return the description of a member in errors."""
        name = self._name_of(rank)
        return name if name == f"rank {rank}" else f"rank {rank} ({name!r})"

    def series(self, key: Key) -> Series:
        """Return the series of a key; make it if it does not exist."""
        found = self._all.get(key)
        if found is None:
            found = self._all[key] = Series(key, self._rank, self._size, self)
            self._alike.setdefault(key[:2], {})[key.replicas] = found
        self._all.move_to_end(key)
        return found

    def drop(self, in_use: Iterable[Series]) -> list[Series]:
        """Forget the least recently used series beyond `SERIES_MAX`.

        If a forgotten series is used again, it goes on at the round of the others.
        """
        surplus = len(self._all) - SERIES_MAX
        if surplus <= 0:
            return []
        kept = set(in_use)
        idle = [one for one in self._all.values() if not (one.is_busy or one in kept)]
        for one in idle[:surplus]:
            tag = one.key[:2]
            del self._all[one.key]
            alike = self._alike[tag]
            del alike[one.key.replicas]
            if not alike:
                del self._alike[tag]
            if self._last.get(tag) is one:
                del self._last[tag]
        return idle[:surplus]

    def join(self, series: Series, *, is_marked: bool = False) -> None:
        """Join the next round of a series."""
        self._last[series.key[:2]] = series
        series.join(is_marked=is_marked)
        for waits in tuple(series.elsewhere):
            self._look_at(series, waits)
        for other in self._alike[series.key[:2]].values():
            self._tell_where(other, series)
        self._count_other(series)

    def abort(self, series: Series, failure: Failure) -> None:
        """Join the next round only to give it up."""
        self._last[series.key[:2]] = series
        series.abort(failure)
        self._count_other(series)

    def receive(self, series: Series, rank: int, message: RoundMessage) -> None:
        """Take the message of a neighbour.

        Raises:
            MalformedError: the sender is not a neighbour, a round is far ahead, or the
                message does not fit the series.
        """
        if not series.is_neighbour(rank):
            raise MalformedError(
                f"rank {rank} is not a neighbour in {series.key.label(message.number)}"
            )
        self._check_near(series, message)
        if isinstance(message, WaitsElsewhere):
            if message.rank not in series.ranks:
                raise MalformedError(
                    f"rank {message.rank} is not a member of the series"
                )
            if not self._look_at(series, message):
                series.note_elsewhere(message, rank)
        else:
            series.receive(rank, message)
            for other in self._alike[series.key[:2]].values():
                self._tell_where(series, other)
        self._count_other(series)

    def _check_near(self, series: Series, message: RoundMessage) -> None:
        """Refuse a message with a round far beyond those that are known.

        Raises:
            MalformedError: a round is more than `AHEAD_MAX` ahead.
        """
        far = series.newest + AHEAD_MAX
        told = [message.number]
        other: TagRound | None = None
        match message:
            case KnownArrivals():
                told += [message.passed, message.latest]
            case Report():
                told.append(message.passed)
            case RoundFailed():
                told.append(message.passed)
                other = message.failure.failed_with
            case WaitsElsewhere():
                other = message.elsewhere
        if other is not None:
            known = self._all.get(series.key._replace(replicas=other.replicas))
            newest = -1 if known is None else known.newest
            told.append(other.number - newest + series.newest)
        if max(told) > far:
            raise MalformedError(
                f"{series.key.label(max(told))} is more than {AHEAD_MAX} rounds ahead"
            )

    def due(self) -> list[tuple[Series, int]]:
        """Return series and rank of each message that is due, and clear the outbox."""
        due = list(self.outbox)
        self.outbox.clear()
        return due

    def _tell_where(self, missed: Series, other: Series) -> None:
        """Tell a series in which this worker is missing that it waits in another."""
        failure = other.failure if other is self._last.get(other.key[:2]) else None
        is_there = other.is_waiting or (
            failure is not None and failure.blame is Blame.MISMATCH
        )
        # At the end members may differ in the set of lost ranks; waves correct that.
        is_mistake = missed.key.purpose is Purpose.RENDEZVOUS
        if is_mistake and missed is not other and missed.is_missed and is_there:
            elsewhere = TagRound(other.key.replicas, other.number)
            waits = WaitsElsewhere(missed.latest, self._rank, elsewhere)
            missed.note_elsewhere(waits, None)

    def _look_at(self, series: Series, waits: WaitsElsewhere) -> bool:
        """Fail two rounds if two members wait for each other; return whether so."""
        replicas, number = waits.elsewhere
        if (
            not series.is_waiting
            or series.number != waits.number
            or waits.rank not in series.ranks
            or series.has_joined(waits.rank)
            or self._rank not in (range(self._size) if replicas is None else replicas)
        ):
            return False
        other = self.series(series.key._replace(replicas=replicas))
        if other.number >= number:
            return False
        here, there = self.who(self._rank), self.who(waits.rank)
        problem = (
            f"{there} called rendezvous {series.key.tag!r} with "
            f"{self._listed(replicas)}, {here} with "
            f"{self._listed(series.key.replicas)}; all members must pass the same "
            "replicas"
        )
        ranks = waits.rank, self._rank
        both = TagRound(series.key.replicas, series.number), waits.elsewhere
        series.fail(Failure(Blame.MISMATCH, problem, ranks, both[1]))
        other.fail_ahead(number, Failure(Blame.MISMATCH, problem, ranks, both[0]))
        return True

    def _count_other(self, series: Series) -> None:
        """Count the round that failed together with that of a series, once."""
        other = None if series.failure is None else series.failure.failed_with
        if series.counts_other and other is not None:
            series.counts_other = False
            replicas, number = other
            if replicas is None or self._rank in replicas:
                self.series(series.key._replace(replicas=replicas)).count(number)

    def _listed(self, replicas: Replicas) -> str:
        if replicas is None:
            return f"all {self._size} ranks"
        listed = ", ".join(map(str, replicas[:LISTED_MAX]))
        more = len(replicas) - LISTED_MAX
        shown = f"{listed}, and {more} more" if more > 0 else listed
        return f"replicas [{shown}]"
