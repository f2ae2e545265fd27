"""After how long a worker should have room again."""

from __future__ import annotations

import pytest

from asyncrpc.core.calls.machine.served_rate import (
    QUIET_S,
    RETRY_AFTER_MAX_S,
    RETRY_AFTER_S,
    ServedRate,
)


def test_first_refusal_gives_the_default_delay() -> None:
    assert ServedRate().retry_after_s(10**6, 100, 5.0) == RETRY_AFTER_S


def test_delay_is_the_time_in_which_as_many_calls_ended() -> None:
    rate = ServedRate()
    rate.retry_after_s(1000, 100, 5.0)
    assert rate.retry_after_s(1050, 100, 5.5) == pytest.approx(1.0)


def test_rate_covers_the_last_seconds() -> None:
    rate = ServedRate()
    for tenth in range(50):  # 100 calls/s
        rate.retry_after_s(10 * tenth, 100, tenth / 10)
    for tenth in range(1, 31):  # then 1,000 calls/s
        delay_s = rate.retry_after_s(490 + 100 * tenth, 100, 4.9 + tenth / 10)
    assert delay_s == pytest.approx(0.1)


def test_quiet_period_gives_the_default_delay() -> None:
    rate = ServedRate()
    rate.retry_after_s(0, 100, 0.0)
    assert rate.retry_after_s(1, 100, QUIET_S + 1) == RETRY_AFTER_S
    assert rate.retry_after_s(201, 100, QUIET_S + 2) == pytest.approx(0.5)


def test_stalled_rate_gives_the_default_delay_and_has_a_limit() -> None:
    rate = ServedRate()
    rate.retry_after_s(7, 100, 0.0)
    assert rate.retry_after_s(7, 100, 0.5) == RETRY_AFTER_S
    assert rate.retry_after_s(8, 100, 0.0) == RETRY_AFTER_S, "no time has passed"
    assert rate.retry_after_s(8, 10**6, 0.9) == RETRY_AFTER_MAX_S
