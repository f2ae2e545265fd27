"""What the loop does itself, since it is always short."""

from __future__ import annotations

from collections.abc import Hashable

import pytest

from asyncrpc.core.autograd.inline import (
    BLOCKED_S,
    FORGIVEN_AFTER,
    KINDS_MAX,
    LATE_MAX,
    LONG,
    SHORT_MAX_S,
    SHORT_S,
    TRIALS,
    TRIALS_MAX,
    WAIT_S,
    WAYS,
    WAYS_KEPT,
    InlinePolicy,
)

LONG_S = LONG * SHORT_S


def try_out(pace: InlinePolicy, kind: Hashable = "a", trials: int = TRIALS) -> None:
    """Run something short in a thread, as often as the loop wants it tried."""
    for _ in range(trials):
        assert not pace.is_short(kind)
        pace.note(kind, SHORT_S / 2, SHORT_S)
    assert pace.is_short(kind)


def test_untried_function_is_not_short() -> None:
    pace = InlinePolicy()
    try_out(pace)
    assert not pace.is_short("b")


@pytest.mark.parametrize(
    ("cpu_s", "took_s"), [(2 * SHORT_S, 2 * SHORT_S), (0.0, 2 * WAIT_S)]
)
def test_slow_trial_starts_the_trials_over(cpu_s: float, took_s: float) -> None:
    pace = InlinePolicy()
    pace.note("a", SHORT_S / 2, SHORT_S / 2)
    pace.note("a", cpu_s, took_s)
    try_out(pace)


def test_trial_that_waits_for_a_core_still_counts_as_short() -> None:
    pace = InlinePolicy()
    for _ in range(TRIALS):
        pace.note("a", SHORT_S, WAIT_S)
    assert pace.is_short("a")


@pytest.mark.parametrize(
    ("cpu_s", "took_s"), [(2 * LONG_S, 2 * LONG_S), (0.0, 2 * BLOCKED_S)]
)
def test_function_that_often_blocked_the_loop_needs_more_trials(
    cpu_s: float, took_s: float
) -> None:
    pace = InlinePolicy()
    for _ in range(LATE_MAX):
        try_out(pace)
        pace.note("a", LONG_S, BLOCKED_S)  # a little late: it stays
        assert pace.is_short("a")
        pace.note("a", cpu_s, took_s)
        assert not pace.is_short("a")
    try_out(pace, trials=TRIALS_MAX)


def test_processor_time_is_measured_after_the_first_long_run() -> None:
    pace = InlinePolicy()
    try_out(pace)
    assert not pace.is_watched("a")
    pace.note("a", None, LONG_S)
    assert not pace.is_watched("a")
    pace.note("a", None, 2 * LONG_S)  # by itself, or by the machine: that is not known
    assert pace.is_watched("a")
    assert pace.is_short("a")
    pace.note("a", LONG_S, 2 * LONG_S)  # it was the machine
    assert not pace.is_watched("a")
    assert pace.is_short("a")
    pace.note("a", None, 2 * LONG_S)
    pace.note("a", 2 * LONG_S, 2 * LONG_S)
    assert not pace.is_watched("a")
    assert not pace.is_short("a")
    try_out(pace)
    pace.note("a", None, 2 * BLOCKED_S)  # long enough to be of the work
    assert not pace.is_short("a")


def test_rare_blocking_of_the_loop_is_forgiven() -> None:
    pace = InlinePolicy()
    for _ in range(3 * LATE_MAX):
        try_out(pace)
        for _ in range(FORGIVEN_AFTER):
            pace.note("a", SHORT_S, SHORT_S)
        pace.note("a", 2 * LONG_S, 2 * LONG_S)
    try_out(pace)


def test_remembered_kinds_are_limited() -> None:
    pace = InlinePolicy()
    try_out(pace, "first")
    for kind in range(KINDS_MAX):
        pace.note(kind, 0.0, 0.0)
    assert not pace.is_short("first")


def test_short_limit_grows_with_the_delay_of_a_thread() -> None:
    pace = InlinePolicy()
    way_s = 1.5 * SHORT_S / WAYS
    for _ in range(WAYS_KEPT):
        pace.note_way(way_s)
    assert pace.short_s == pytest.approx(1.5 * SHORT_S)
    for _ in range(TRIALS):
        assert not pace.is_short("a")
        pace.note("a", 1.4 * SHORT_S, 1.4 * SHORT_S)
    assert pace.is_short("a")
    pace.note("a", None, 1.4 * LONG_S)
    assert not pace.is_watched("a")
    pace.note("a", 1.6 * LONG_S, 1.6 * LONG_S)
    assert not pace.is_short("a")


@pytest.mark.parametrize(
    ("way_s", "short_s"), [(0.0, SHORT_S), (1.0, SHORT_MAX_S)], ids=["least", "most"]
)
def test_short_limit_has_bounds(way_s: float, short_s: float) -> None:
    pace = InlinePolicy()
    for _ in range(WAYS_KEPT):
        pace.note_way(way_s)
    assert pace.short_s == short_s


def test_few_waits_for_a_core_do_not_raise_the_short_limit() -> None:
    pace = InlinePolicy()
    for number in range(2 * WAYS_KEPT):
        pace.note_way(1.0 if number % 3 == 0 else 0.0)
    assert pace.short_s == SHORT_S
    for _ in range(WAYS_KEPT):
        pace.note_way(1.0)
    assert pace.short_s == SHORT_MAX_S
