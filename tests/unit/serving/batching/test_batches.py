"""Which requests form a batch, and when."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrpc.serving.batching.machine.batches import BatchLimits, BatchQueue
from asyncrpc.serving.batching.machine.fair_queue import QueuedRequest
from asyncrpc.serving.batching.machine.overload import QueueLimits

LIMITS = QueueLimits(waiting_max=100, places=1, turn_max=3)


def new_batches(limits: QueueLimits = LIMITS, **batch: Any) -> BatchQueue[str]:
    options = {"max_size": 3, "max_wait_s": 1.0, **batch}
    return BatchQueue(BatchLimits(**options), limits)


def add(
    batches: BatchQueue[str], name: str, came_s: float = 0.0, **options: Any
) -> None:
    assert batches.queue.offer(QueuedRequest(name, came_s, **options), came_s) is None


def take_names(batches: BatchQueue[str], now_s: float, **options: Any) -> str:
    return "".join(request.subject for request in batches.next_batch(now_s, **options))


def test_full_batch_is_due() -> None:
    batches = new_batches()
    for name in "abcd":
        add(batches, name)
    assert take_names(batches, 0.0) == "abc"
    assert take_names(batches, 0.0) == ""


def test_batch_is_due_when_its_oldest_request_has_waited() -> None:
    batches = new_batches()
    assert batches.wakes_at_s() is None
    add(batches, "a", 2.0)
    add(batches, "b", 2.5)
    assert batches.wakes_at_s() == 3.0
    assert take_names(batches, 2.9) == ""
    assert take_names(batches, 3.0) == "ab"
    assert batches.wakes_at_s() is None


def test_closing_queue_makes_every_batch_due() -> None:
    batches = new_batches()
    add(batches, "a")
    assert take_names(batches, 0.0, is_closing=True) == "a"


def test_batch_waits_while_all_places_are_busy() -> None:
    batches = new_batches()
    batches.queue.rate.begin("one", 0.0)
    for name in "abc":
        add(batches, name)
    assert take_names(batches, 9.0) == ""
    assert batches.wakes_at_s() is None, "its end is told"
    batches.queue.rate.drop("one")
    assert take_names(batches, 9.0) == "abc"


def test_batch_bytes_are_limited() -> None:
    batches = new_batches(max_bytes=10)
    add(batches, "a", size=6)
    assert take_names(batches, 0.0) == ""
    add(batches, "b", size=6)
    assert take_names(batches, 0.0) == "a", "full by bytes"
    assert take_names(batches, 0.0) == ""
    assert take_names(batches, 1.0) == "b"


def test_buckets_fill_independently() -> None:
    batches = new_batches()
    add(batches, "a", 0.0, bucket="x")
    add(batches, "b", 0.1, bucket="y")
    add(batches, "c", 0.2, bucket="y")
    assert take_names(batches, 0.5) == ""
    add(batches, "d", 0.5, bucket="y")
    assert take_names(batches, 0.5) == "bcd", "the one that is full"
    assert batches.wakes_at_s() == 1.0
    assert take_names(batches, 1.0) == "a"


def test_queue_wakes_for_requests_to_be_dropped() -> None:
    limits = QueueLimits(waiting_max=9, places=1, turn_max=3, max_age_s=5.0)
    batches = new_batches(limits, max_wait_s=60.0)
    add(batches, "a", deadline_s=2.0)
    assert batches.wakes_at_s() == 2.0
    batches.queue.rate.begin("one", 0.0)
    assert batches.wakes_at_s() == 2.0


@pytest.mark.parametrize(
    ("max_bytes", "nbytes", "cost"),
    [(None, 10**9, 0.25), (100, 10, 0.25), (100, 50, 0.5), (100, 100, 1.0)],
)
def test_request_costs_its_largest_share(
    max_bytes: int | None, nbytes: int, cost: float
) -> None:
    limits = BatchLimits(max_size=4, max_wait_s=0.0, max_bytes=max_bytes)
    assert limits.cost_of(nbytes) == cost
