"""Queues of requests: all are answered once, nobody is starved, shares are fair.

Hypothesis plays clients of several priorities, sizes and buckets, who come, leave and
have deadlines; it takes batches whenever it likes.
"""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from asyncrpc.serving.batching.machine.fair_queue import FairQueue, QueuedRequest
from asyncrpc.serving.batching.machine.overload import (
    BatchLimits,
    BatchQueue,
    DropReason,
    QueueLimits,
    QueueRefusal,
)

CLIENTS = st.sampled_from("abc")
COSTS = st.sampled_from([0.125, 0.25, 1.0])
SIZE_MAX, BYTES_MAX, AGE_MAX_S, WAITING_MAX = 3, 10, 8.0, 12
WAIT_S = 2.0


class Batches(RuleBasedStateMachine):
    """Safety: each request has one end; a batch has what a batch may have."""

    evicts_oldest = False

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.limits = BatchLimits(SIZE_MAX, WAIT_S, BYTES_MAX)
        self.batches: BatchQueue[int] = BatchQueue(
            self.limits,
            QueueLimits(
                waiting_max=WAITING_MAX,
                places=2,
                turn_max=SIZE_MAX,
                max_age_s=AGE_MAX_S,
                standing_age_s=AGE_MAX_S / 2,
                evicts_oldest=self.evicts_oldest,
            ),
        )
        self.waiting: dict[int, QueuedRequest[int]] = {}
        self.ends: Counter[int] = Counter()
        self.taken: dict[tuple[str, int, str], int] = {}
        self.running: list[tuple[int, int]] = []
        self.serial = 0

    @property
    def queue(self):  # type: ignore[no-untyped-def]
        return self.batches.queue

    @rule(
        client=CLIENTS,
        priority=st.integers(0, 2),
        bucket=st.sampled_from("xy"),
        size=st.integers(0, BYTES_MAX),
        allowed_s=st.none() | st.integers(1, 20),
    )
    def come(
        self, client: str, priority: int, bucket: str, size: int, allowed_s: int | None
    ) -> None:
        self.serial += 1
        request = QueuedRequest(
            self.serial,
            self.now_s,
            deadline_s=None if allowed_s is None else self.now_s + allowed_s,
            client=client,
            priority=priority,
            bucket=bucket,
            size=size,
            cost=self.limits.cost_of(size),
        )
        evicted = self.queue.offer(request, self.now_s)
        if isinstance(evicted, QueueRefusal):
            assert evicted.retry_after_s > 0
            self.ends[self.serial] += 1
            return
        self.waiting[self.serial] = request
        if evicted is not None:
            assert evicted.priority <= priority
            self.end(evicted.subject)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.waiting)))
        assert self.queue.remove(self.waiting[number])
        self.end(number)

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        for request, reason in self.queue.drop_due(self.now_s):
            if reason is DropReason.EXPIRED:
                assert request.deadline_s <= self.now_s
            else:
                assert self.now_s - request.came_s >= AGE_MAX_S / 2
            self.end(request.subject)

    @rule()
    def form(self) -> None:
        """Form a batch, if one is due: it is, if a bucket is full or old."""
        has_place = self.queue.rate.has_place
        oldest = min(
            (request.came_s for request in self.waiting.values()), default=None
        )
        taken = self.batches.next_batch(self.now_s)
        if has_place and oldest is not None and oldest + WAIT_S <= self.now_s:
            assert taken
        if not taken:
            return
        assert has_place
        assert len(taken) <= SIZE_MAX
        assert sum(request.size for request in taken) <= BYTES_MAX
        assert len({request.bucket for request in taken}) == 1
        for request in taken:
            assert request.deadline_s is None or request.deadline_s > self.now_s
            self.end(request.subject)
            # In order, of one client, priority and bucket.
            key = (str(request.client), request.priority, str(request.bucket))
            assert self.taken.get(key, 0) < request.subject
            self.taken[key] = request.subject
        self.running.append((taken[0].subject, len(taken)))
        self.queue.rate.begin(taken[0].subject, self.now_s)

    @precondition(lambda self: self.running)
    @rule()
    def end_batch(self) -> None:
        turn, requests = self.running.pop(0)
        self.queue.rate.end(turn, requests, self.now_s)

    def end(self, number: int) -> None:
        del self.waiting[number]
        self.ends[number] += 1

    @invariant()
    def requests_end_once_or_wait(self) -> None:
        assert len(self.queue.waiting) == len(self.waiting) <= WAITING_MAX
        for number in range(1, self.serial + 1):
            assert self.ends[number] + (number in self.waiting) == 1

    @invariant()
    def clock_is_set_for_all_waiting_requests(self) -> None:
        if self.waiting:
            assert self.batches.wakes_at_s() is not None

    def teardown(self) -> None:
        while self.running:
            self.end_batch()
        while self.waiting:
            taken = self.batches.next_batch(self.now_s, is_closing=True)
            assert taken
            for request in taken:
                self.end(request.subject)


class BatchesOfTheNewest(Batches):
    """The same, where the oldest request gives way."""

    evicts_oldest = True


TestBatches = Batches.TestCase
TestBatchesOfTheNewest = BatchesOfTheNewest.TestCase


@given(
    requests=st.lists(st.tuples(CLIENTS, COSTS), min_size=20, max_size=60),
    counts=st.lists(st.integers(1, 4), min_size=60, max_size=60),
)
def test_two_busy_clients_get_equal_shares(
    requests: list[tuple[str, float]], counts: list[int]
) -> None:
    """Within two requests' cost of each other, from any moment to any other."""
    queue: FairQueue[str] = FairQueue(1.0)
    for client, cost in requests:
        queue.add(QueuedRequest(client, 0.0, client=client, cost=cost))
    served = {client: [0.0] for client in "abc"}
    while True:
        left = Counter(request.client for request in queue)
        backlogged = [client for client in "abc" if left[client]]
        if len(backlogged) < 3:
            break
        (request,) = queue.take(None, 1, None)
        for client in "abc":
            served[client].append(
                served[client][-1] + (request.cost if request.client == client else 0.0)
            )
    moments = len(served["a"])
    for begin in range(moments):
        for end in range(begin, moments):
            shares = [served[client][end] - served[client][begin] for client in "abc"]
            assert max(shares) - min(shares) <= 2.0


@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 3), CLIENTS, st.sampled_from("xy")), max_size=150
    )
)
def test_less_important_request_waits_for_the_head_start_only(
    arrivals: list[tuple[int, str, str]],
) -> None:
    """One request is taken each second, and one comes that is more important."""
    queue: FairQueue[str] = FairQueue(2.0)
    low = QueuedRequest("low", 0.0, client="low", priority=0)
    queue.add(low)
    for second, (priority, client, bucket) in enumerate(arrivals):
        now_s = float(second)
        if low not in queue:
            break
        queue.add(
            QueuedRequest("", now_s, client=client, priority=priority, bucket=bucket)
        )
        queue.take(queue.leader(queue.buckets), 1, None)
        # What came in its head start of 6 s, and its share of what came with it.
        assert low not in queue or second <= 6 + 8 * 4
