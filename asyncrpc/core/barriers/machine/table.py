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
from collections.abc import Callable
from typing import Final

from asyncrpc.core.barriers.machine.series import Series
from asyncrpc.core.barriers.messages import (
    LISTED_MAX,
    Blame,
    Failure,
    Key,
    Purpose,
    Replicas,
    RoundFailed,
    SeriesNotice,
    TagRound,
    WaitsElsewhere,
)
from asyncrpc.errors import MalformedError

SERIES_MAX: Final = 4096  # that are remembered
# How far ahead of what is known a message may be: rounds of 1 ms for 50 days.  So no
# member can use up the numbers, which end at 2^63.
AHEAD_MAX: Final = 1 << 32


class SeriesTable:
    """All series of one worker; `outbox` has series and rank of each message due."""

    def __init__(self, rank: int, size: int, name_of: Callable[[int], str]) -> None:
        self.outbox: dict[tuple[Series, int], None] = {}
        self._rank = rank
        self._size = size
        self._name_of = name_of
        self._all: OrderedDict[Key, Series] = OrderedDict()
        # Of each purpose and tag: the series, and the last that this worker came to.
        self._alike: dict[tuple[Purpose, str], dict[Replicas, Series]] = {}
        self._last: dict[tuple[Purpose, str], Series] = {}

    def who(self, rank: int) -> str:
        """Return the description of a member in errors."""
        name = self._name_of(rank)
        return name if name == f"rank {rank}" else f"rank {rank} ({name!r})"

    def series(self, key: Key) -> Series:
        """Return the series of a key; make it if it does not exist."""
        series = self._all.get(key)
        if series is None:
            series = self._all[key] = Series(key, self._rank, self._size, self)
            self._alike.setdefault(key[:2], {})[key.replicas] = series
        self._all.move_to_end(key)
        return series

    def known(self, key: Key) -> Series | None:
        """Return the series of a key, unless this worker has none."""
        return self._all.get(key)

    def drop(self, used: Series | None = None) -> list[Series]:
        """Forget the least recently used series beyond `SERIES_MAX`, but for `used`.

        If a forgotten series is used again, it goes on at the round of the others.
        """
        surplus = len(self._all) - SERIES_MAX
        if surplus <= 0:
            return []
        series = self._all.values()
        idle = [
            candidate
            for candidate in series
            if not (candidate.is_busy or candidate is used)
        ][:surplus]
        for forgotten in idle:
            tag = forgotten.key[:2]
            del self._all[forgotten.key], self._alike[tag][forgotten.key.replicas]
            if not self._alike[tag]:
                del self._alike[tag]
            if self._last.get(tag) is forgotten:
                del self._last[tag]
        return idle

    def due(self) -> list[tuple[Series, int]]:
        """Return series and rank of each message that is due, and clear the outbox."""
        due = list(self.outbox)
        self.outbox.clear()
        return due

    def join(self, series: Series, *, is_marked: bool = False) -> None:
        """Join the next round of a series."""
        self._last[series.key[:2]] = series
        series.join(is_marked=is_marked)
        for notice in tuple(series.elsewhere):
            self._closes_circle(series, notice)
        for other in self._alike[series.key[:2]].values():
            self._tell_where(other, series)

    def receive(self, rank: int, notice: SeriesNotice) -> None:
        """Take the message of a neighbour; refuse what does not fit its series."""
        series = self.series(notice.key)
        self._check_near(series, notice)
        if not isinstance(notice, WaitsElsewhere):
            series.receive(rank, notice)
            for other in self._alike[notice.key[:2]].values():
                self._tell_where(series, other)
        elif notice.rank not in series.ranks:
            raise MalformedError(f"rank {notice.rank} is not a member of the series")
        elif not self._closes_circle(series, notice):
            series.note_elsewhere(notice, rank)

    def _check_near(self, series: Series, notice: SeriesNotice) -> None:
        """Refuse a message with a round far beyond those that are known."""
        ahead = [
            getattr(notice, field, -1) - series.newest
            for field in ("number", "passed", "latest")
        ]
        other = None
        if isinstance(notice, WaitsElsewhere):
            other = notice.elsewhere
        elif isinstance(notice, RoundFailed):
            other = notice.failure.failed_with
        if other is not None:
            known = self._all.get(notice.key._replace(replicas=other.replicas))
            ahead.append(other.number - (-1 if known is None else known.newest))
        if max(ahead) > AHEAD_MAX:
            label = notice.key.label(series.newest + max(ahead))
            raise MalformedError(f"{label} is more than {AHEAD_MAX} rounds ahead")

    # --- deadlocks -------------------------------------------------------------------

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
            notice = WaitsElsewhere(missed.key, missed.latest, self._rank, elsewhere)
            missed.note_elsewhere(notice, None)

    def _closes_circle(self, series: Series, notice: WaitsElsewhere) -> bool:
        """Fail two rounds if two members wait for each other; return whether so."""
        replicas, number = notice.elsewhere
        if (
            not series.is_waiting
            or series.number != notice.number
            or notice.rank not in series.ranks
            or series.has_joined(notice.rank)
            or self._rank not in (range(self._size) if replicas is None else replicas)
        ):
            return False
        other = self.series(series.key._replace(replicas=replicas))
        if other.number >= number:
            return False
        here, there = self.who(self._rank), self.who(notice.rank)
        problem = (
            f"{there} called rendezvous {series.key.tag!r} with "
            f"{self._listed(replicas)}, {here} with "
            f"{self._listed(series.key.replicas)}; all members must pass the same "
            "replicas"
        )
        ranks = notice.rank, self._rank
        this = TagRound(series.key.replicas, series.number)
        other.fail_round(number, Failure(Blame.MISMATCH, problem, ranks, this))
        series.fail(Failure(Blame.MISMATCH, problem, ranks, notice.elsewhere))
        return True

    def on_failed(self, series: Series) -> None:
        """Count the round that failed together with that of a series as come to."""
        together = None if series.failure is None else series.failure.failed_with
        if together is None:
            return
        replicas, number = together
        if replicas is None or self._rank in replicas:
            other = self.series(series.key._replace(replicas=replicas))
            if not other.is_waiting and other.number < number:
                other.number += 1

    def _listed(self, replicas: Replicas) -> str:
        if replicas is None:
            return f"all {self._size} ranks"
        listed = ", ".join(map(str, replicas[:LISTED_MAX]))
        more = len(replicas) - LISTED_MAX
        shown = f"{listed}, and {more} more" if more > 0 else listed
        return f"replicas [{shown}]"
