"""Rates come from the last events: over a window, or over what is remembered."""

from __future__ import annotations

import math
from typing import Any

import pytest

from asyncrpc.core.ids import Incarnation, WorkerId
from asyncrpc.core.trace.events import CallEnded, CallServed
from asyncrpc.tools.inspection.events import KIND_NAMES, RecentEvents
from asyncrpc.tools.inspection.machine.rates import by_function, percentile, rates_of
from asyncrpc.trace import RECENT_MAX

PEER = WorkerId("b", Incarnation(2))


def recent(**events: list[Any]) -> RecentEvents:
    return RecentEvents(
        100.0, 0, [], **{name: events.get(name, []) for name in KIND_NAMES}
    )


def call(at_s: float, took_s: float = 0.01, outcome: str = "ok") -> CallEnded:
    return CallEnded(at_s, at_s - took_s, PEER, "add", 1, outcome, 300, 200, "")


def test_rates_count_calls_ended_in_the_window() -> None:
    calls = [call(90.0), call(96.0, 0.02), call(97.0, 0.04, "ValueError")]
    rates = rates_of(recent(calls=calls), window_s=5.0).made
    assert (rates.per_s, rates.failed_per_s, rates.bytes_per_s) == (0.4, 0.2, 200.0)
    assert rates.p50_s == pytest.approx(0.02)
    assert rates.p99_s == pytest.approx(0.04)


def test_full_ring_shortens_the_window() -> None:
    calls = [call(99.0 + place / RECENT_MAX) for place in range(RECENT_MAX)]
    assert rates_of(recent(calls=calls), window_s=5.0).made.per_s == RECENT_MAX


@pytest.mark.parametrize("place", [0, RECENT_MAX - 1])
def test_inspection_calls_do_not_count_as_work(place: int) -> None:
    calls = [call(99.0 + at / RECENT_MAX) for at in range(RECENT_MAX)]
    calls[place] = calls[place]._replace(function="inspection.summary")
    rates = rates_of(recent(calls=calls), window_s=5.0).made
    assert rates.per_s == RECENT_MAX - 1
    served = [CallServed(99.0, 98.0, 98.9, PEER, "inspection.calls", 1, "ok")]
    assert by_function(recent(served=served), window_s=5.0) == {}


def test_empty_record_has_no_percentiles() -> None:
    rates = rates_of(recent(), window_s=5.0)
    assert rates.made.per_s == rates.steps_per_s == 0.0
    assert math.isnan(rates.served.p50_s)


def test_function_times_include_the_wait_of_the_request() -> None:
    served = [
        CallServed(99.0, 98.0, 98.9, PEER, "slow", 1, "ok"),
        CallServed(99.5, 99.4, 99.4, PEER, "fast", 2, "ok"),
    ]
    rates = by_function(recent(served=served), window_s=5.0)
    assert rates["slow"].p50_s == 1.0
    assert rates["fast"].per_s == 0.2


def test_percentiles_are_values_that_occur() -> None:
    values = [float(number) for number in range(1, 101)]
    assert percentile(values, 0.5) == 50.0
    assert percentile(values, 0.99) == 99.0
    assert percentile([3.0], 0.99) == 3.0
