"""Who may wait, and who is dropped."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

import pytest

from asyncrpc.serving.batching.machine.fair_queue import QueuedRequest
from asyncrpc.serving.batching.machine.overload import (
    DropReason,
    ExpiryHeap,
    QueueLimits,
    QueueRefusal,
    ServiceQueue,
)

LIMITS = QueueLimits(waiting_max=100, places=1, turn_max=4)


def queue_of(limits: QueueLimits, *, turn_s: float = 0.0) -> ServiceQueue[str]:
    """Return a queue; with a `turn_s`, one that has seen such turns, and runs one."""
    queue: ServiceQueue[str] = ServiceQueue(limits)
    if turn_s:
        for turn in range(5):
            queue.rate.begin(turn, -turn_s)
            queue.rate.end(turn, limits.turn_max, 0.0)
        queue.rate.begin("runs", 0.0)
    return queue


def request(
    came_s: float = 0.0,
    *,
    deadline_s: float | None = None,
    client: Hashable = None,
    priority: int = 0,
) -> QueuedRequest[str]:
    return QueuedRequest(
        "", came_s, deadline_s=deadline_s, client=client, priority=priority
    )


def fill(queue: ServiceQueue[str], count: int, client: Hashable = None) -> None:
    """Let so many wait that came when nothing was before them."""
    for _ in range(count):
        queue.waiting.add(request(client=client))


def refusal_of(
    queue: ServiceQueue[str], new: QueuedRequest[str], now_s: float = 0.0
) -> QueueRefusal | None:
    """Return why a request must not wait; one that may is taken out again."""
    refusal = queue.offer(new, now_s)
    if isinstance(refusal, QueueRefusal):
        return refusal
    queue.remove(new)
    return None


def wait(queue: ServiceQueue[str], new: QueuedRequest[str]) -> None:
    assert queue.offer(new, new.came_s) is None


class TestRefusals:
    def test_full_queue_refuses_a_request(self) -> None:
        queue = queue_of(replace(LIMITS, waiting_max=2))
        fill(queue, 2)
        refusal = refusal_of(queue, request(), 0.0)
        assert refusal is not None
        assert "2 requests wait, the limit (waiting_max)" in refusal.problem
        assert refusal.retry_after_s > 0
        assert queue.counts.refused == 1

    def test_full_queue_makes_room_for_a_client_with_less(self) -> None:
        queue = queue_of(replace(LIMITS, waiting_max=2))
        fill(queue, 2, client="a")
        evicted = queue.offer(request(client="b"), 0.0)
        assert isinstance(evicted, QueuedRequest)
        assert evicted.client == "a"
        assert len(queue.waiting) == 2
        assert (queue.counts.evicted, queue.counts.refused) == (1, 0)

    def test_oldest_request_makes_room_for_each_new_one(self) -> None:
        queue = queue_of(replace(LIMITS, waiting_max=2, evicts_oldest=True))
        first, second, third = (request(float(at)) for at in range(3))
        wait(queue, first)
        wait(queue, second)
        assert queue.offer(third, 2.0) is first
        assert isinstance(queue.offer(request(3.0, priority=-1), 3.0), QueueRefusal)

    def test_oldest_request_makes_room_in_time(self) -> None:
        """As many wait as go next; one more would wait for a turn more."""
        limits = replace(LIMITS, max_age_s=1.0, evicts_oldest=True)
        queue = queue_of(limits, turn_s=1.0)
        requests = [request(at / 10) for at in range(6)]
        for entry in requests[:4]:
            wait(queue, entry)
        assert queue.offer(requests[4], 0.4) is requests[0]
        assert queue.offer(requests[5], 0.5) is requests[1]
        assert (queue.counts.evicted, queue.counts.refused) == (2, 0)
        # One that would be too late anyway takes nobody's place.
        queue.rate.drop("runs")
        queue.rate.begin("slow", 2.0)
        assert isinstance(queue.offer(request(0.9), 0.9), QueueRefusal)
        assert len(queue.waiting) == 4

    def test_queue_without_time_limits_refuses_nothing_else(self) -> None:
        queue = queue_of(LIMITS, turn_s=1000.0)
        fill(queue, 99)
        assert refusal_of(queue, request(), 0.0) is None

    def test_request_that_would_wait_too_long_is_refused(self) -> None:
        """The rest of the turn that runs, and those before it, of 1 s and 4 each."""
        queue = queue_of(replace(LIMITS, max_age_s=2.0), turn_s=1.0)
        fill(queue, 7)
        assert refusal_of(queue, request(), 0.0) is None
        fill(queue, 1)
        refusal = refusal_of(queue, request(), 0.0)
        assert refusal is not None
        assert "longer than 2 s (max_queue_age_s)" in refusal.problem
        assert refusal_of(queue, request(), 1.0) is None, "the turn is about to end"

    def test_request_of_another_client_waits_less(self) -> None:
        queue = queue_of(replace(LIMITS, max_age_s=1.5), turn_s=1.0)
        fill(queue, 50, client="a")
        assert refusal_of(queue, request(client="a"), 0.0) is not None
        assert refusal_of(queue, request(client="b"), 0.0) is None
        assert refusal_of(queue, request(client="a", priority=1), 0.0) is None

    def test_free_place_prevents_refusals(self) -> None:
        queue = queue_of(replace(LIMITS, places=2, max_age_s=0.001), turn_s=1000.0)
        fill(queue, 3)
        assert refusal_of(queue, request(deadline_s=0.5), 0.0) is None

    def test_request_that_would_miss_its_deadline_is_refused(self) -> None:
        """The rest of the turn that runs, and its own."""
        queue = queue_of(LIMITS, turn_s=1.0)
        refusal = refusal_of(queue, request(deadline_s=1.4), 0.5)
        assert refusal is not None
        assert "would be answered after 1.5 s" in refusal.problem
        assert "deadline is in 0.9 s" in refusal.problem
        assert refusal_of(queue, request(deadline_s=2.0), 0.5) is None

    def test_request_whose_turn_need_only_begin_may_end_late(self) -> None:
        queue = queue_of(replace(LIMITS, whole_turns=False), turn_s=1.0)
        assert refusal_of(queue, request(deadline_s=1.0), 0.5) is None
        refusal = refusal_of(queue, request(deadline_s=0.9), 0.5)
        assert refusal is not None
        assert "would begin after 0.5 s" in refusal.problem


class TestDrops:
    def test_expired_request_is_dropped(self) -> None:
        queue = queue_of(LIMITS)
        late, later, other = (
            request(deadline_s=2.0),
            request(deadline_s=1.0),
            request(),
        )
        for entry in (late, later, other):
            wait(queue, entry)
        assert queue.drops_at_s == 1.0
        assert list(queue.drop_due(0.9)) == []
        assert list(queue.drop_due(1.0)) == [(later, DropReason.EXPIRED)]
        assert queue.drops_at_s == 2.0
        queue.remove(late)
        assert queue.drops_at_s is None
        assert list(queue.drop_due(9.0)) == []
        assert queue.counts.expired == 1
        assert len(queue.waiting) == 1

    def test_too_old_request_is_dropped(self) -> None:
        queue = queue_of(replace(LIMITS, max_age_s=3.0))
        assert queue.drops_at_s is None
        first, second = request(0.0), request(1.0)
        wait(queue, first)
        wait(queue, second)
        assert queue.drops_at_s == 3.0
        assert list(queue.drop_due(2.9)) == []
        assert list(queue.drop_due(3.0)) == [(first, DropReason.TOO_OLD)]
        assert queue.drops_at_s == 4.0
        assert queue.counts.shed == 1

    def test_forecast_may_be_wrong_by_a_turn(self) -> None:
        queue = queue_of(replace(LIMITS, max_age_s=3.0), turn_s=2.0)
        waiting = request(0.0)
        wait(queue, waiting)
        assert queue.drops_at_s == 5.0
        assert list(queue.drop_due(4.9)) == []
        assert list(queue.drop_due(5.0)) == [(waiting, DropReason.TOO_OLD)]

    def test_standing_queue_has_a_shorter_limit(self) -> None:
        queue = queue_of(replace(LIMITS, max_age_s=3.0, standing_age_s=1.0))
        first, second = request(0.0), request(2.5)
        wait(queue, first)
        wait(queue, second)
        assert queue.drops_at_s == 3.0
        assert list(queue.drop_due(2.9)) == []
        assert list(queue.drop_due(3.0)) == [(first, DropReason.TOO_OLD)]
        assert queue.drops_at_s == 3.5
        assert list(queue.drop_due(3.4)) == []
        assert list(queue.drop_due(3.5)) == [(second, DropReason.TOO_OLD)]

    def test_queue_that_was_empty_is_not_standing(self) -> None:
        queue = queue_of(replace(LIMITS, max_age_s=3.0, standing_age_s=1.0))
        wait(queue, request(0.0))
        queue.take(None, 1, None)
        wait(queue, request(2.5))
        assert queue.drops_at_s == 5.5
        assert list(queue.drop_due(4.0)) == []

    def test_standing_queue_refuses_by_its_own_limit(self) -> None:
        limits = replace(LIMITS, max_age_s=3.0, standing_age_s=1.0)
        queue = queue_of(limits, turn_s=2.0)
        queue.rate.drop("runs")
        first, last = request(0.5), request(3.9)
        wait(queue, first)
        queue.rate.begin("runs", 4.0)
        refusal = refusal_of(queue, request(), 4.0)
        assert refusal is not None
        assert "longer than 1 s" in refusal.problem
        queue.remove(first)
        queue.rate.drop("runs")
        wait(queue, last)
        queue.rate.begin("runs", 4.0)
        assert refusal_of(queue, request(), 4.0) is None, "it was empty a moment ago"

    def test_running_request_is_not_dropped(self) -> None:
        queue = queue_of(replace(LIMITS, max_age_s=3.0))
        wait(queue, request(deadline_s=1.0))
        assert len(queue.take(None, 1, None)) == 1
        assert list(queue.drop_due(9.0)) == []
        assert queue.counts.taken == 1


def test_queue_age_is_that_of_its_oldest_request() -> None:
    queue = queue_of(LIMITS)
    assert queue.age_s(5.0) == 0.0
    wait(queue, request(2.0))
    assert queue.age_s(5.0) == 3.0
    assert queue.age_s(1.0) == 0.0, "clocks may be early"


def test_remove_returns_whether_the_request_waited() -> None:
    queue = queue_of(LIMITS)
    new = request()
    wait(queue, new)
    assert queue.remove(new)
    assert not queue.remove(new)


def test_removed_entries_leave_the_expiry_heap() -> None:
    here: set[int] = set()
    heap: ExpiryHeap[int] = ExpiryHeap(here)
    for number in range(10_000):
        here.add(number)
        heap.add(1000.0 + number, number)
        if number >= 10:
            here.discard(number - 5)
    assert len(heap) < 300
    assert heap.next_s == 1000.0
    over = []
    for number in heap.due(1005.0):
        here.discard(number)
        over.append(number)
    assert over == [0, 1, 2, 3, 4]
    assert heap.next_s == pytest.approx(1000.0 + 9995)
