"""Which requests form a batch, when, and how fast they are done."""

from __future__ import annotations

import asyncio
import contextvars
from typing import Any

import pytest

from asyncrpc.serving.batching.machine.fair_queue import QueuedRequest
from asyncrpc.serving.batching.machine.overload import (
    RETRY_AFTER_MAX_S,
    RETRY_AFTER_UNKNOWN_S,
    TURNS_MIN,
    BatchLimits,
    BatchQueue,
    QueueLimits,
    ServiceRate,
)
from asyncrpc.serving.batching.queues import WakeTimer

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


def after(
    turns: int, *, took_s: float, requests: int = 1, places: int = 1
) -> ServiceRate:
    """Return the rate after so many turns, one after the other, until second 0."""
    rate = ServiceRate(places)
    for turn in range(turns):
        rate.begin(turn, -took_s)
        rate.end(turn, requests, 0.0)
    return rate


def test_first_turns_count_equally() -> None:
    rate = ServiceRate(1)
    for turn, took_s in enumerate((1.0, 2.0, 6.0)):
        rate.begin(turn, 0.0)
        rate.end(turn, turn, took_s)
    assert rate.turn_s == pytest.approx(3.0)
    assert rate.requests == pytest.approx(1.0)
    assert rate.ended == 3


def test_later_turns_count_for_an_eighth() -> None:
    rate = after(20, took_s=1.0)
    rate.begin("slow", 0.0)
    rate.end("slow", 9, 9.0)
    assert rate.turn_s == pytest.approx(2.0)
    assert rate.requests == pytest.approx(2.0)


def test_cancelled_turn_does_not_count() -> None:
    rate = after(3, took_s=1.0)
    rate.begin("cancelled", 0.0)
    assert rate.running == 1
    rate.drop("cancelled")
    rate.drop("cancelled")
    assert (rate.running, rate.ended, rate.turn_s) == (0, 3, 1.0)


def test_few_turns_give_no_forecast() -> None:
    rate = after(TURNS_MIN - 1, took_s=1.0)
    assert rate.wait_s(10, 0.0) == 0.0
    assert rate.drain_s(10, 0.0) == RETRY_AFTER_UNKNOWN_S
    assert ServiceRate(1).per_s() == 0.0


def test_forecast_counts_the_running_turn_and_the_turns_ahead() -> None:
    rate = after(TURNS_MIN, took_s=4.0)
    assert rate.has_place
    assert rate.wait_s(0, 0.0) == 0.0
    assert rate.wait_s(2, 0.0) == 8.0
    rate.begin("runs", 0.0)
    assert not rate.has_place
    assert rate.wait_s(0, 1.0) == 3.0
    assert rate.wait_s(2, 1.0) == 11.0
    assert rate.wait_s(0, 9.0) == 0.0, "it takes longer than others did"


def test_places_share_the_turns() -> None:
    rate = after(TURNS_MIN, took_s=4.0, places=2)
    rate.begin("first", 0.0)
    assert rate.has_place
    rate.begin("second", 1.0)
    assert not rate.has_place
    assert rate.wait_s(0, 2.0) == 2.0, "the one that began first ends first"
    assert rate.wait_s(3, 2.0) == 8.0


def test_drain_time_follows_from_the_rate() -> None:
    rate = after(TURNS_MIN, took_s=2.0, requests=8)
    rate.begin("runs", 0.0)
    assert rate.drain_s(0, 0.5) == 3.5
    assert rate.drain_s(7, 0.5) == 3.5
    assert rate.drain_s(8, 0.5) == 5.5
    assert rate.drain_s(10**6, 0.5) == RETRY_AFTER_MAX_S
    assert rate.per_s() == 4.0


async def test_due_time_may_be_set_again() -> None:
    """On uvloop, what waits for no time is no timer."""
    woken: asyncio.Queue[float] = asyncio.Queue()
    timer = WakeTimer(woken.put_nowait)
    context = contextvars.copy_context()
    now_s = asyncio.get_running_loop().time()
    for at_s in (now_s, now_s, now_s - 1.0):
        timer.set(at_s, context)
    assert await woken.get() == now_s - 1.0
    assert woken.empty()


async def test_last_time_set_counts() -> None:
    woken: asyncio.Queue[float] = asyncio.Queue()
    timer = WakeTimer(woken.put_nowait)
    context = contextvars.copy_context()
    now_s = asyncio.get_running_loop().time()
    timer.set(now_s + 3600.0, context)
    timer.set(None, context)
    timer.set(now_s + 0.002, context)
    assert await woken.get() == now_s + 0.002
    assert woken.empty()
