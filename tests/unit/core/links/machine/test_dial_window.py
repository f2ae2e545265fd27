"""The window of dials: it grows while peers answer quickly, and is never closed."""

from __future__ import annotations

import itertools

import pytest

from asyncrpc.core.links.machine.dial_window import (
    QUICK_S,
    SLOW_S,
    WINDOW_FIRST,
    WINDOW_MAX,
    WINDOW_MIN,
    DialWindow,
)

TIMES_S = (QUICK_S, (QUICK_S + SLOW_S) / 2, 2 * SLOW_S)


def test_window_limits_concurrent_dials() -> None:
    window = DialWindow()
    begun = 0
    while window.may_begin:
        window.on_begun()
        begun += 1
    assert begun == WINDOW_FIRST
    window.on_ended()
    assert window.may_begin


def test_window_doubles_in_the_time_of_one_handshake() -> None:
    window = DialWindow()
    for expected in (8, 16, 32, 64, 64):
        for _ in range(window.size):
            window.on_begun()
        for _ in range(window.size):
            window.on_answered(QUICK_S)
            window.on_ended()
        assert window.size == expected


def test_slow_handshake_halves_the_window() -> None:
    window = DialWindow()
    window.size = 40
    window.on_answered(SLOW_S)
    assert window.size == 40
    window.on_answered(SLOW_S + 0.01)
    assert window.size == 20


@pytest.mark.parametrize("times", list(itertools.product(TIMES_S, repeat=4)))
def test_window_stays_between_its_limits(times: tuple[float, ...]) -> None:
    for first in (WINDOW_MIN, WINDOW_FIRST, WINDOW_MAX):
        window = DialWindow()
        window.size = first
        for took_s in times:
            window.on_answered(took_s)
            assert WINDOW_MIN <= window.size <= WINDOW_MAX


def test_shrunken_window_begins_no_dial_until_there_is_room() -> None:
    window = DialWindow()
    for _ in range(WINDOW_FIRST):
        window.on_begun()
    window.on_answered(SLOW_S + 1)
    for under_way in range(WINDOW_FIRST - 1, -1, -1):
        window.on_ended()
        assert window.may_begin is (under_way < WINDOW_MIN)
