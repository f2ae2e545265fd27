"""Requests that wait, and which of them go next: by priority, fairly between clients.

A step of priority is a head start of some seconds: of two levels, the one goes first
whose oldest request came first, after the head start.  So a less important request
waits at most that long behind requests that came later.

Between the clients of a level it is weighted by what they were given: each has a tag,
which grows by the cost of what it is served; the least tag goes next.  A client that
comes back begins at the clock of its level, or where it left off if that is later: idle
time earns nothing, and leaving does not clear a debt.  The clock of a level goes at the
rate at which one of its clients is served, so that new clients do not starve the
waiting ones.  Within a client, requests go in the order in which they came.

Only requests of one bucket go together.

Invariants: of two clients that wait all the time in one bucket and level, neither gets
more than two of its requests' cost above the other; every request is taken once, or
removed once.

Source: P. Goyal, H. Vin, H. Cheng, "Start-time Fair Queuing", SIGCOMM 1996 (tags that
are given when a request is served, not when it comes, so that one that leaves costs its
client nothing: C. Waldspurger, "Stride Scheduling", MIT/LCS/TM-528, 1995); the clock is
that of J. Bennett, H. Zhang, "Hierarchical Packet Fair Queueing", SIGCOMM 1996.  A full
queue takes from its longest part, as in RFC 8290, section 4.2.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Iterable, Iterator
from typing import Final, Generic, TypeVar

T = TypeVar("T")

_FORGET_ABOVE: Final = 16  # shares of clients that do not wait, beyond those that do


class QueuedRequest(Generic[T]):
    """One request that waits.

    Attributes:
        subject: the service's own object, which is not read here.
        came_s: when it arrived.
        deadline_s: when it must no longer run; None: never.
        priority: a higher one goes sooner.
        bucket: it only goes together with others of the same bucket.
        size: its part of the size limit of all that go together.
        cost: what it takes of its client's share; 1 is a whole batch.
    """

    __slots__ = (
        *("bucket", "came_s", "client", "cost", "deadline_s", "priority"),
        *("serial", "size", "subject"),
    )

    def __init__(
        self,
        subject: T,
        came_s: float,
        *,
        deadline_s: float | None = None,
        priority: int = 0,
        client: Hashable = None,
        bucket: Hashable = None,
        size: int = 0,
        cost: float = 1.0,
    ) -> None:
        self.subject = subject
        self.came_s = came_s
        self.deadline_s = deadline_s
        self.priority = priority
        self.client = client
        self.bucket = bucket
        self.size = size
        self.cost = cost
        self.serial = 0


class _ClientShare:
    """What one client was given in one level.

    Attributes:
        tag: the client with the least one goes next.
    """

    __slots__ = ("tag", "waiting")

    def __init__(self, tag: float) -> None:
        self.tag = tag
        self.waiting = 0


class _PriorityLevel:
    """The clients of one priority.

    Attributes:
        shares: by client; also of some clients that do not wait.
        clock: the tag with which a new client begins.
    """

    __slots__ = ("clients", "clock", "shares", "waiting")

    def __init__(self) -> None:
        self.shares: dict[Hashable, _ClientShare] = {}
        self.clock = 0.0
        self.waiting = 0
        self.clients = 0

    def enter(self, client: Hashable) -> None:
        share = self.shares.get(client)
        if share is None:
            share = self.shares[client] = _ClientShare(self.clock)
        if not share.waiting:
            share.tag = max(share.tag, self.clock)
            self.clients += 1
        share.waiting += 1
        self.waiting += 1

    def leave(self, client: Hashable) -> None:
        share = self.shares[client]
        share.waiting -= 1
        self.waiting -= 1
        if not share.waiting:
            self.clients -= 1

    def serve(self, client: Hashable, cost: float) -> None:
        """Charge a client for the requests that are about to be served."""
        share = self.shares[client]
        self.clock = max(self.clock + cost / self.clients, share.tag)
        share.tag += cost
        if len(self.shares) > 2 * self.clients + _FORGET_ABOVE:
            self._forget()

    def waiting_of(self, client: Hashable) -> int:
        share = self.shares.get(client)
        return 0 if share is None else share.waiting

    def longest(self) -> Hashable:
        """Return the client with the most requests."""
        return max(self.shares, key=lambda client: self.shares[client].waiting)

    def _forget(self) -> None:
        """Drop the shares of clients that would begin at the clock anyway."""
        clock = self.clock
        self.shares = {
            client: share
            for client, share in self.shares.items()
            if share.waiting or share.tag > clock
        }


class _WaitingLine(Generic[T]):
    """The requests of one bucket and one priority, in order."""

    __slots__ = ("arrivals", "by_client")

    def __init__(self) -> None:
        self.arrivals: dict[QueuedRequest[T], None] = {}
        self.by_client: dict[Hashable, dict[QueuedRequest[T], None]] = {}

    @property
    def oldest(self) -> QueuedRequest[T]:
        return next(iter(self.arrivals))

    def first_of(self, client: Hashable) -> QueuedRequest[T]:
        return next(iter(self.by_client[client]))

    def add(self, request: QueuedRequest[T]) -> None:
        self.arrivals[request] = None
        self.by_client.setdefault(request.client, {})[request] = None

    def remove(self, request: QueuedRequest[T]) -> None:
        del self.arrivals[request]
        own = self.by_client[request.client]
        del own[request]
        if not own:
            del self.by_client[request.client]


class _Bucket(Generic[T]):
    """The requests that may go together.

    Attributes:
        lines: by priority; without empty ones.
        size: sum of their sizes.
    """

    __slots__ = ("lines", "size", "waiting")

    def __init__(self) -> None:
        self.lines: dict[int, _WaitingLine[T]] = {}
        self.waiting = 0
        self.size = 0

    def add(self, request: QueuedRequest[T]) -> None:
        line = self.lines.get(request.priority)
        if line is None:
            line = self.lines[request.priority] = _WaitingLine()
        line.add(request)
        self.waiting += 1
        self.size += request.size

    def remove(self, request: QueuedRequest[T]) -> None:
        line = self.lines[request.priority]
        line.remove(request)
        if not line.arrivals:
            del self.lines[request.priority]
        self.waiting -= 1
        self.size -= request.size

    @property
    def oldest_s(self) -> float:
        return min(line.oldest.came_s for line in self.lines.values())


class FairQueue(Generic[T]):
    """Requests that wait."""

    def __init__(self, priority_step_s: float) -> None:
        self._priority_step_s = priority_step_s
        self._arrivals: dict[QueuedRequest[T], None] = {}
        self._levels: dict[int, _PriorityLevel] = {}
        self._buckets: dict[Hashable, _Bucket[T]] = {}
        self._serials = itertools.count()

    def __len__(self) -> int:
        return len(self._arrivals)

    def __iter__(self) -> Iterator[QueuedRequest[T]]:
        """Iterate over all requests, the oldest first."""
        return iter(self._arrivals)

    def __contains__(self, request: object) -> bool:
        return request in self._arrivals

    @property
    def oldest(self) -> QueuedRequest[T] | None:
        """The request that has waited longest; None: no request waits."""
        return next(iter(self._arrivals), None)

    @property
    def buckets(self) -> Iterable[Hashable]:
        """The buckets that requests wait in."""
        return self._buckets.keys()

    def waiting_in(self, bucket: Hashable) -> tuple[int, int, float]:
        """Return number, size, and oldest arrival of the requests in a bucket."""
        bucket_queue = self._buckets[bucket]
        return bucket_queue.waiting, bucket_queue.size, bucket_queue.oldest_s

    def add(self, request: QueuedRequest[T]) -> None:
        """Let a request wait that came after all others."""
        request.serial = next(self._serials)
        self._arrivals[request] = None
        level = self._levels.get(request.priority)
        if level is None:
            level = self._levels[request.priority] = _PriorityLevel()
        level.enter(request.client)
        bucket = self._buckets.get(request.bucket)
        if bucket is None:
            bucket = self._buckets[request.bucket] = _Bucket()
        bucket.add(request)

    def remove(self, request: QueuedRequest[T]) -> None:
        """Remove a waiting request; its client is not charged."""
        del self._arrivals[request]
        bucket = self._buckets[request.bucket]
        bucket.remove(request)
        if not bucket.waiting:
            del self._buckets[request.bucket]
        level = self._levels[request.priority]
        level.leave(request.client)
        if not level.waiting:  # without a rival there is no debt
            del self._levels[request.priority]

    # --- which go next ---------------------------------------------------------------

    def leader(self, buckets: Iterable[Hashable]) -> Hashable:
        """Return which of some nonempty buckets is next."""
        chosen = list(buckets)
        if len(chosen) == 1:
            return chosen[0]
        candidates = [self._buckets[bucket] for bucket in chosen]
        priority = min(
            (priority for candidate in candidates for priority in candidate.lines),
            key=lambda priority: min(
                self._order_of(priority, candidate.lines[priority])
                for candidate in candidates
                if priority in candidate.lines
            ),
        )
        shares = self._levels[priority].shares
        _, _, bucket = min(
            (
                (shares[client].tag, line.first_of(client).serial, bucket)
                for bucket in chosen
                if (line := self._buckets[bucket].lines.get(priority)) is not None
                for client in line.by_client
            ),
            key=lambda entry: entry[:2],
        )
        return bucket

    def take(
        self, bucket: Hashable, count_max: int, size_max: int | None
    ) -> list[QueuedRequest[T]]:
        """Take out the next requests of a bucket, and charge their clients.

        Args:
            size_max: limit of their total size; None: no limit.  The first request that
                does not fit holds back the others, as it would starve otherwise.
        """
        batch: list[QueuedRequest[T]] = []
        size_free = size_max
        lines = self._buckets[bucket].lines
        heaps: dict[int, list[tuple[float, int, Hashable]]] = {}
        while lines and len(batch) < count_max:
            priority = self._next_level(lines)
            line, shares = lines[priority], self._levels[priority].shares
            heap = heaps.get(priority)
            if heap is None:
                heap = heaps[priority] = [
                    (shares[client].tag, line.first_of(client).serial, client)
                    for client in line.by_client
                ]
                heapq.heapify(heap)
            client = heap[0][2]
            request = line.first_of(client)
            if size_free is not None:
                if request.size > size_free:
                    break
                size_free -= request.size
            heapq.heappop(heap)
            self._levels[priority].serve(client, request.cost)
            self.remove(request)
            batch.append(request)
            if client in line.by_client:
                tag = self._levels[priority].shares[client].tag
                heapq.heappush(heap, (tag, line.first_of(client).serial, client))
        return batch

    def _next_level(self, lines: dict[int, _WaitingLine[T]]) -> int:
        if len(lines) == 1:
            return next(iter(lines))
        return min(
            lines, key=lambda priority: self._order_of(priority, lines[priority])
        )

    def _order_of(self, priority: int, line: _WaitingLine[T]) -> tuple[float, int]:
        """Return the rank of a level: when its oldest came, after the head start."""
        oldest = line.oldest
        return oldest.came_s - priority * self._priority_step_s, oldest.serial

    # --- how many are ahead of a request ---------------------------------------------

    def ahead_of(self, priority: int, client: Hashable) -> int:
        """Return how many requests at most go before one that would come now.

        In its own level, other clients have as many turns as its client.
        """
        ahead = sum(
            level.waiting for own, level in self._levels.items() if own > priority
        )
        level = self._levels.get(priority)
        if level is None:
            return ahead
        own = level.waiting_of(client)
        clients = level.clients + (not own)
        return ahead + min(level.waiting, (own + 1) * clients - 1)

    def to_evict(
        self, priority: int, client: Hashable, *, oldest: bool = False
    ) -> QueuedRequest[T] | None:
        """Return the request that should give way to one that would come now.

        It belongs to the client with the most requests in the lowest priority.

        Args:
            oldest: return the client's first one, even if the new one has no better
                right to the place; else its last one.
        """
        if not self._levels:
            return None
        lowest = min(self._levels)
        if lowest > priority:
            return None
        level = self._levels[lowest]
        longest = None
        if lowest == priority:
            own = level.waiting_of(client)
            if (own + 1) * level.clients > level.waiting:  # it has its share already
                if not oldest:
                    return None
                longest = client if own else None
        if longest is None:
            longest = level.longest()
        lines = [
            line.by_client[longest]
            for bucket in self._buckets.values()
            if (line := bucket.lines.get(lowest)) is not None
            and longest in line.by_client
        ]
        if oldest:
            return min(map(_first, lines), key=_serial)
        return max(map(_last, lines), key=_serial)


def _first(line: dict[QueuedRequest[T], None]) -> QueuedRequest[T]:
    return next(iter(line))


def _last(line: dict[QueuedRequest[T], None]) -> QueuedRequest[T]:
    return next(reversed(line))


def _serial(request: QueuedRequest[T]) -> int:
    return request.serial
