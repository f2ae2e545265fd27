"""Which requests may wait, and which are dropped: what to do with too much of them.

A request is refused at once if the queue is full, or if, by the measured rate, it would
wait longer than it may: until it is too old, or until its deadline, or so long that it
could not be answered by then.  It is told after which time to come again.  A full queue
makes room for a request that has a better right to it: of a higher priority, or of a
client that has less than its share.  A queue that evicts the oldest makes room for each
that comes: as much runs as otherwise, and has waited less.

A request that waits is dropped when its deadline passes, and when it is too old.  What
too old means may depend on the queue: one that has not been empty for `max_age_s` is
standing, and not a burst; then `standing_age_s` counts.

The rate is a forecast.  It only ever refuses while something runs, so a wrong one is
corrected by what runs next.  What it has let in is dropped only if it was wrong by a
whole turn: else the requests that make up the next turn would often be dropped a moment
before it begins.

Source: K. Nichols, V. Jacobson, "Controlling Queue Delay", ACM Queue 2012 (the time in
the queue is the signal, and a standing queue the fault); B. Maurer, "Fail at Scale",
ACM Queue 2015 (two limits, by whether the queue has been empty lately; under overload
the newest run); H. Zhou et al., "Overload Control for Scaling WeChat Microservices",
SoCC 2018 (priorities, and refusing at the entry).
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from asyncrpc.serving.batching.machine.expiry import ExpiryHeap
from asyncrpc.serving.batching.machine.fair_queue import FairQueue, QueuedRequest
from asyncrpc.serving.batching.machine.service_rate import ServiceRate

T = TypeVar("T")


class DropReason(enum.Enum):
    """Why a request that waited will not run."""

    EXPIRED = "its deadline passed while it waited"
    TOO_OLD = "it waited too long"
    EVICTED = "it gave way to another, while the queue was full"


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """What may wait.

    Attributes:
        waiting_max: so many requests.
        places: turns that may run at the same time.
        turn_max: requests in one turn.
        max_age_s: so long at most, as far as can be foretold; None: without a limit.
        standing_age_s: so long if the queue has not been empty for `max_age_s`; None:
            `max_age_s` too.
        priority_step_s: head start of each step of priority.
        evicts_oldest: whether what has waited longest makes room for what comes, so
            that what runs has not waited long; else what comes is refused, unless it
            has a better right to a place.
        whole_turns: whether a request is of use only if its turn ends by its deadline;
            else it is if the turn begins by then.
    """

    waiting_max: int
    places: int
    turn_max: int
    max_age_s: float | None = None
    standing_age_s: float | None = None
    priority_step_s: float = 1.0
    evicts_oldest: bool = False
    whole_turns: bool = True


@dataclass(frozen=True, slots=True)
class QueueRefusal:
    """Why a request may not wait.

    Attributes:
        problem: in words.
        retry_after_s: after which time there should be room.
    """

    problem: str
    retry_after_s: float


@dataclass(slots=True)
class QueueCounts:
    """What has happened to requests that came, ever.

    Attributes:
        admitted: they may wait.
        refused: they were not.
        expired: dropped because of their deadlines.
        shed: dropped because they were too old.
        evicted: dropped because others had a better right to the place.
        taken: they run, or have run.
    """

    admitted: int = 0
    refused: int = 0
    expired: int = 0
    shed: int = 0
    evicted: int = 0
    taken: int = 0


class ServiceQueue(Generic[T]):
    """The requests that wait for something with a limited rate.

    Attributes:
        waiting: the requests.
        rate: at which they are done.
        counts: of what has happened.
    """

    def __init__(self, limits: QueueLimits) -> None:
        """Hold nothing yet."""
        self.waiting: FairQueue[T] = FairQueue(limits.priority_step_s)
        self.rate = ServiceRate(limits.places)
        self.counts = QueueCounts()
        self._limits = limits
        self._deadlines: ExpiryHeap[QueuedRequest[T]] = ExpiryHeap(self.waiting)
        self._busy_since_s = 0.0  # since when it has not been empty, if it is not

    # --- who may wait ----------------------------------------------------------------

    def offer(
        self, request: QueuedRequest[T], now_s: float
    ) -> QueueRefusal | QueuedRequest[T] | None:
        """Let a request wait, or refuse it.

        Returns:
            Why it must not wait; or the request that has given way to it, and will not
            run; None: there was room.
        """
        problem, needs_room = self._problem(request, now_s)
        evicted = None
        if problem is not None and needs_room:
            evicted = self.waiting.to_evict(
                request.priority, request.client, oldest=self._limits.evicts_oldest
            )
        if problem is not None and evicted is None:
            self.counts.refused += 1
            retry_after_s = self.rate.drain_s(len(self.waiting), now_s)
            return QueueRefusal(problem, retry_after_s)
        if evicted is not None:
            self.waiting.remove(evicted)
            self.counts.evicted += 1
        self._add(request)
        return evicted

    def _problem(
        self, request: QueuedRequest[T], now_s: float
    ) -> tuple[str | None, bool]:
        """Return why a request must not wait, and whether a place would let it."""
        waiting, limits = self.waiting, self._limits
        if len(waiting) >= limits.waiting_max:
            return f"{len(waiting)} requests wait, the limit (waiting_max)", True
        age_max_s = self._age_max_s(now_s)
        is_unlimited = age_max_s is None and request.deadline_s is None
        if is_unlimited or self.rate.has_place:
            return None, False  # in the second case nothing that runs is before it
        ahead = waiting.ahead_of(request.priority, request.client)
        problem = self._problem_of_wait(request, ahead, age_max_s, now_s)
        if problem is None or not limits.evicts_oldest or not ahead:
            return problem, False
        with_room = self._problem_of_wait(request, ahead - 1, age_max_s, now_s)
        return problem, with_room is None

    def _problem_of_wait(
        self,
        request: QueuedRequest[T],
        ahead: int,
        age_max_s: float | None,
        now_s: float,
    ) -> str | None:
        limits, deadline_s = self._limits, request.deadline_s
        wait_s = self.rate.wait_s(ahead // limits.turn_max, now_s)
        if age_max_s is not None and wait_s > age_max_s:
            return (
                f"at the present rate it would wait {wait_s:.3g} s, longer than "
                f"{age_max_s:g} s (max_queue_age_s)"
            )
        if deadline_s is None:
            return None
        answer_s = wait_s + (self.rate.turn_s if limits.whole_turns else 0.0)
        if now_s + answer_s <= deadline_s:
            return None
        what = "be answered" if limits.whole_turns else "begin"
        return (
            f"at the present rate it would {what} after {answer_s:.3g} s, and its "
            f"deadline is in {deadline_s - now_s:.3g} s"
        )

    def _add(self, request: QueuedRequest[T]) -> None:
        if not self.waiting:
            self._busy_since_s = request.came_s
        self.waiting.add(request)
        self.counts.admitted += 1
        if request.deadline_s is not None:
            self._deadlines.add(request.deadline_s, request)

    def remove(self, request: QueuedRequest[T]) -> bool:
        """Let a request go; return whether it waited."""
        if request not in self.waiting:
            return False
        self.waiting.remove(request)
        return True

    def take(
        self, bucket: Hashable, count_max: int, size_max: int | None
    ) -> list[QueuedRequest[T]]:
        """Take out those that go next; see `FairQueue.take`."""
        taken = self.waiting.take(bucket, count_max, size_max)
        self.counts.taken += len(taken)
        return taken

    # --- who waits in vain -----------------------------------------------------------

    def drop_due(self, now_s: float) -> Iterator[tuple[QueuedRequest[T], DropReason]]:
        """Let those go that must not run any more."""
        for request in self._deadlines.due(now_s):
            self.waiting.remove(request)
            self.counts.expired += 1
            yield request, DropReason.EXPIRED
        while (age_s := self._age_max_s(now_s)) is not None:
            oldest = self.waiting.oldest
            if oldest is None or oldest.came_s + age_s + self._error_s > now_s:
                return
            self.waiting.remove(oldest)
            self.counts.shed += 1
            yield oldest, DropReason.TOO_OLD

    @property
    def drops_at_s(self) -> float | None:
        """When to call `drop_due` next; None: not before something else happens."""
        times = [] if (next_s := self._deadlines.next_s) is None else [next_s]
        oldest, limits = self.waiting.oldest, self._limits
        if oldest is not None and limits.max_age_s is not None:
            begin_s, age_s = oldest.came_s, limits.max_age_s
            if limits.standing_age_s is not None:  # it counts once the queue is old
                begin_s, age_s = self._busy_since_s + age_s, limits.standing_age_s
            times.append(max(begin_s, oldest.came_s + age_s + self._error_s))
        return min(times, default=None)

    @property
    def _error_s(self) -> float:
        """By how much the forecast may be wrong."""
        return self.rate.turn_s if self.rate.is_known else 0.0

    def _age_max_s(self, now_s: float) -> float | None:
        limits = self._limits
        if limits.standing_age_s is None or limits.max_age_s is None:
            return limits.max_age_s
        is_standing = (
            bool(self.waiting) and now_s >= self._busy_since_s + limits.max_age_s
        )
        return limits.standing_age_s if is_standing else limits.max_age_s

    def age_s(self, now_s: float) -> float:
        """Return how long the oldest request has waited; 0 if none waits."""
        oldest = self.waiting.oldest
        return 0.0 if oldest is None else max(0.0, now_s - oldest.came_s)
