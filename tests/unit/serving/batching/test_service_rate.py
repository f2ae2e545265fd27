"""How fast work is done, by what has ended."""

from __future__ import annotations

import pytest

from asyncrpc.serving.batching.machine.service_rate import (
    RETRY_AFTER_MAX_S,
    RETRY_AFTER_UNKNOWN_S,
    TURNS_MIN,
    ServiceRate,
)


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
