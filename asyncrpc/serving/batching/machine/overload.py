"""Which requests may wait, which are dropped, and which form the next batch.

A request is refused at once if the queue is full, or if, by the measured rate, it would
wait longer than it may: until it is too old, or until its deadline, or so long that it
could not be answered by then.  The refusal tells when to try again.  A full queue makes
room for a request with a better claim: of a higher priority, or of a client that has
less than its share.  A queue that evicts the oldest makes room for every new request:
the throughput is the same, and the served requests have waited less.

A waiting request is dropped when its deadline passes, and when it is too old.  The age
limit may depend on the queue: one that has not been empty for `max_age_s` is standing,
and not a burst; then `standing_age_s` counts.

Work is done in turns (a batch, a sequence, a handler), several at a time in as many
places.  The length of a turn and its number of requests are moving means: each new turn
counts for an eighth; the first turns count equally.  The rate is a forecast.  It leads
to refusals only while something runs, so that a wrong forecast is corrected by the next
turns.  A request that was let in is dropped only if the forecast was wrong by a whole
turn: otherwise the requests of the next turn would often be dropped a moment before it
begins.

A batch is due when a bucket is full, by number or by bytes, or when the oldest request
in it has waited long enough.  While the maximum of batches runs, the next requests
gather, so batches grow with the load.

Source: K. Nichols, V. Jacobson, "Controlling Queue Delay", ACM Queue 2012 (the time in
the queue is the signal, and a standing queue the fault); B. Maurer, "Fail at Scale",
ACM Queue 2015 (two limits, by whether the queue has been empty lately; under overload
the newest run); H. Zhou et al., "Overload Control for Scaling WeChat Microservices",
SoCC 2018 (priorities, and refusing at the entry).  RFC 6298, section 2 (the weight of
1/8 for a smoothed time); J. Little, "A Proof for the Queuing Formula L = λW", 1961.
E. Crankshaw et al., "Clipper: A Low-Latency Online Prediction Serving System", NSDI
2017, section 4.3 (delayed batching).

"""

from __future__ import annotations

import enum
import heapq
import itertools
import math
from collections.abc import Container, Hashable, Iterator
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from asyncrpc.serving.batching.machine.fair_queue import FairQueue, QueuedRequest

T = TypeVar("T")

_STALE_MAX: Final = 64  # entries of things that have left, beyond those still here


class ExpiryHeap(Generic[T]):
    """Which of the things in a container have expired, and when the next one will."""

    __slots__ = ("_compact_above", "_container", "_heap", "_serials")

    def __init__(self, container: Container[T]) -> None:
        """Begin with nothing to watch.

        Args:
            container: of the things; one that has left it does not expire.
        """
        self._container = container
        self._heap: list[tuple[float, int, T]] = []
        self._serials = itertools.count()
        self._compact_above = _STALE_MAX

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, at_s: float, thing: T) -> None:
        """Watch a thing that is in the container."""
        if len(self._heap) > self._compact_above:
            self._compact()
        heapq.heappush(self._heap, (at_s, next(self._serials), thing))

    def due(self, now_s: float) -> Iterator[T]:
        """Yield expired things; the caller removes each from the container at once."""
        while (at_s := self.next_s) is not None and at_s <= now_s:
            yield heapq.heappop(self._heap)[2]

    @property
    def next_s(self) -> float | None:
        """When the next thing expires; None: nothing is left."""
        while self._heap and self._heap[0][2] not in self._container:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def _compact(self) -> None:
        """Drop the entries of things that have left, in amortized constant time."""
        self._heap = [entry for entry in self._heap if entry[2] in self._container]
        heapq.heapify(self._heap)
        self._compact_above = 2 * len(self._heap) + _STALE_MAX


WEIGHT: Final = 1 / 8
TURNS_MIN: Final = 3  # turns that must have ended before there is a forecast
RETRY_AFTER_UNKNOWN_S: Final = 1.0
RETRY_AFTER_MAX_S: Final = 60.0


class ServiceRate:
    """The rate at which turns end.

    Attributes:
        turn_s: mean length of a turn; 0 before the first.
        requests: mean number of requests in one.
    """

    __slots__ = ("_places", "_running", "ended", "requests", "turn_s")

    def __init__(self, places: int) -> None:
        self._places = places
        self._running: dict[object, float] = {}  # when each began, in this order
        self.ended = 0
        self.turn_s = 0.0
        self.requests = 1.0

    @property
    def running(self) -> int:
        """How many turns run."""
        return len(self._running)

    @property
    def has_place(self) -> bool:
        """Return whether one more turn may run."""
        return len(self._running) < self._places

    def begin(self, turn: object, now_s: float) -> None:
        """Note that a turn begins."""
        self._running[turn] = now_s

    def end(self, turn: object, requests: int, now_s: float) -> None:
        """Note the end of a typical turn: it counts for the means."""
        took_s = now_s - self._running.pop(turn)
        self.ended += 1
        weight = max(WEIGHT, 1 / self.ended)
        self.turn_s += (took_s - self.turn_s) * weight
        self.requests += (requests - self.requests) * weight

    def drop(self, turn: object) -> None:
        """Note the end of a turn that does not count, such as a cancelled one.

        Does nothing if the turn has already ended.
        """
        self._running.pop(turn, None)

    @property
    def is_known(self) -> bool:
        """Return whether enough turns have ended for a forecast."""
        return self.ended >= TURNS_MIN

    def wait_s(self, turns_before: int, now_s: float) -> float:
        """Return how long a turn will at least wait with so many turns before it.

        Returns 0 before there is a forecast.
        """
        if not self.is_known:
            return 0.0
        first_s = 0.0
        if not self.has_place:
            oldest_s = next(iter(self._running.values()))
            first_s = max(0.0, oldest_s + self.turn_s - now_s)
        return first_s + turns_before * self.turn_s / self._places

    def drain_s(self, waiting: int, now_s: float) -> float:
        """Return the seconds until all waiting requests should have begun."""
        if not self.is_known:
            return RETRY_AFTER_UNKNOWN_S
        turns = math.ceil((waiting + 1) / self.requests)
        # Turns may have been too short for the clock: 0 would mean "at once".
        wait_s = self.wait_s(turns, now_s) or RETRY_AFTER_UNKNOWN_S
        return min(wait_s, RETRY_AFTER_MAX_S)

    def per_s(self) -> float:
        """Return how many requests per second are served if all places are taken."""
        return self.requests * self._places / self.turn_s if self.turn_s else 0.0


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


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What makes a batch.

    Attributes:
        max_wait_s: how long the oldest one waits for others.
        max_bytes: of all requests in it; None: no limit.
    """

    max_size: int
    max_wait_s: float
    max_bytes: int | None = None

    def cost_of(self, size_bytes: int) -> float:
        """Return the share of a batch that a request takes, by number or by bytes.

        Source: A. Ghodsi et al., "Dominant Resource Fairness", NSDI 2011.
        """
        share = 1 / self.max_size
        return share if not self.max_bytes else max(share, size_bytes / self.max_bytes)


class BatchQueue(Generic[T]):
    """Requests that wait for a batch."""

    def __init__(self, batch: BatchLimits, limits: QueueLimits) -> None:
        self.queue: ServiceQueue[T] = ServiceQueue(limits)
        self._batch = batch

    def next_batch(
        self, now_s: float, *, is_closing: bool = False
    ) -> list[QueuedRequest[T]]:
        """Take out the requests of the next batch; empty if none is due.

        The caller has dropped the requests that are due to be dropped.
        """
        if not self.queue.rate.has_place:
            return []
        waiting = self.queue.waiting
        due = [
            bucket
            for bucket in waiting.buckets
            if is_closing or self._is_full(bucket) or self._due_s(bucket) <= now_s
        ]
        if not due:
            return []
        batch = self._batch
        return self.queue.take(waiting.leader(due), batch.max_size, batch.max_bytes)

    def wakes_at_s(self) -> float | None:
        """Return when to look again; None: not before something else happens."""
        times = []
        if (drops_at_s := self.queue.drops_at_s) is not None:
            times.append(drops_at_s)
        if self.queue.rate.has_place:
            times += [self._due_s(bucket) for bucket in self.queue.waiting.buckets]
        return min(times, default=None)

    def _is_full(self, bucket: Hashable) -> bool:
        count, nbytes, _ = self.queue.waiting.waiting_in(bucket)
        batch = self._batch
        return count >= batch.max_size or (
            batch.max_bytes is not None and nbytes >= batch.max_bytes
        )

    def _due_s(self, bucket: Hashable) -> float:
        return self.queue.waiting.waiting_in(bucket)[2] + self._batch.max_wait_s
