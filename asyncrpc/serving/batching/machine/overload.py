"""Which requests may wait, and which are dropped, under overload.

A request is refused at once if the queue is full, or if, by the measured rate, it would
wait longer than it may: until it is too old, or until its deadline, or so long that it
could not be answered by then.  The refusal tells when to try again.  A full queue makes
room for a request with a better claim: of a higher priority, or of a client that has
less than its share.  A queue that evicts the oldest makes room for every new request:
the throughput is the same, and the served requests have waited less.

A waiting request is dropped when its deadline passes, and when it is too old.  The age
limit may depend on the queue: one that has not been empty for `max_age_s` is standing,
and not a burst; then `standing_age_s` counts.

The rate is a forecast.  It leads to refusals only while something runs, so that a wrong
forecast is corrected by the next turns.  A request that was let in is dropped only if
the forecast was wrong by a whole turn: otherwise the requests of the next turn would
often be dropped a moment before it begins.

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
    EVICTED = "another one took its place, while the queue was full"


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """The limits of a queue.

    Attributes:
        waiting_max: requests that may wait.
        places: turns that may run at the same time.
        max_age_s: seconds that a request may wait, by the forecast; None: no limit.
        standing_age_s: the same if the queue has not been empty for `max_age_s`; None:
            `max_age_s` as well.
        priority_step_s: head start of each step of priority.
        evicts_oldest: whether the oldest request makes room for a new one, so that the
            served requests have not waited long; otherwise a new request is refused,
            unless it has a better claim to a place.
        whole_turns: whether a request is useful only if its turn ends by its deadline;
            otherwise its turn must only begin by then.
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
        retry_after_s: seconds after which there should be room.
    """

    problem: str
    retry_after_s: float


@dataclass(slots=True)
class QueueCounts:
    """How many requests were treated how, in total.

    Attributes:
        refused: not let in.
        expired: dropped because of their deadlines.
        shed: dropped because they were too old.
        evicted: dropped because others had a better claim to the place.
    """

    admitted: int = 0
    refused: int = 0
    expired: int = 0
    shed: int = 0
    evicted: int = 0
    taken: int = 0


class ServiceQueue(Generic[T]):
    """The requests that wait for something with a limited rate."""

    def __init__(self, limits: QueueLimits) -> None:
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
        """Let a request wait, or refuse it."""
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
        """Return why a request must not wait, and whether a free place would help."""
        waiting, limits = self.waiting, self._limits
        if len(waiting) >= limits.waiting_max:
            return f"{len(waiting)} requests wait, the limit (waiting_max)", True
        age_max_s = self._age_max_s(now_s)
        is_unlimited = age_max_s is None and request.deadline_s is None
        if is_unlimited or self.rate.has_place:
            return None, False  # in the second case it can run at once
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
        verb = "be answered" if limits.whole_turns else "begin"
        return (
            f"at the present rate it would {verb} after {answer_s:.3g} s, and its "
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
        """Remove a request; return whether it waited."""
        if request not in self.waiting:
            return False
        self.waiting.remove(request)
        return True

    def take(
        self, bucket: Hashable, count_max: int, size_max: int | None
    ) -> list[QueuedRequest[T]]:
        """Take out the next requests; see `FairQueue.take`."""
        requests = self.waiting.take(bucket, count_max, size_max)
        self.counts.taken += len(requests)
        return requests

    # --- requests to drop ------------------------------------------------------------

    def drop_due(self, now_s: float) -> Iterator[tuple[QueuedRequest[T], DropReason]]:
        """Yield and remove the requests that must no longer run."""
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
            if limits.standing_age_s is not None:  # counts once the queue is standing
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
        """Return how long the oldest request has waited; 0 if no request waits."""
        oldest = self.waiting.oldest
        return 0.0 if oldest is None else max(0.0, now_s - oldest.came_s)
