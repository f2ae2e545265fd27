"""Polling stops when it does not pay: these tests are its accounts."""

from __future__ import annotations

import pytest

from asyncrpc.core.loop.spin import PAUSE_MAX_S, PAUSE_S, STOLEN_S, Spin

LIMIT_S = 4e-3
LOOK_S = 2e-6


def polled_s(spin: Spin, start_s: float) -> float:
    """Look until it says stop; return for how long it polled."""
    now_s = start_s
    while spin.on_look(now_s + LOOK_S):
        now_s += LOOK_S
    return now_s - start_s


def exchange(spin: Spin, now_s: float, wait_s: float) -> float:
    """Write, poll as told, and read after `wait_s`; return the time then."""
    end_s = now_s + wait_s
    polling = spin.on_wait(now_s)
    while polling and now_s + LOOK_S < end_s:
        now_s += LOOK_S
        polling = spin.on_look(now_s)
    spin.on_read(end_s)
    return end_s


class TestBounded:
    def test_it_polls_for_its_time_after_a_write_and_no_longer(self) -> None:
        spin = Spin(LIMIT_S, adaptive=False)
        assert spin.on_wait(1.0)
        assert polled_s(spin, 1.0) == pytest.approx(LIMIT_S, abs=2 * LOOK_S)

    def test_what_comes_ends_it(self) -> None:
        spin = Spin(LIMIT_S, adaptive=False)
        spin.on_wait(1.0)
        spin.on_read(1.0 + 10e-6)
        assert not spin.on_look(1.0 + 12e-6)

    def test_it_polls_however_long_answers_take(self) -> None:
        spin = Spin(LIMIT_S, adaptive=False)
        now_s = 1.0
        for _ in range(50):
            now_s = exchange(spin, now_s, 1.0)
        assert spin.on_wait(now_s)


class TestAdaptive:
    def test_it_tries_first(self) -> None:
        assert Spin(LIMIT_S, adaptive=True).on_wait(0.0)

    def test_it_polls_about_twice_as_long_as_answers_lately_took(self) -> None:
        spin = Spin(LIMIT_S, adaptive=True)
        now_s = 1.0
        for _ in range(60):
            now_s = exchange(spin, now_s, 30e-6)
        assert spin.on_wait(now_s)
        assert polled_s(spin, now_s) == pytest.approx(70e-6, abs=5e-6)

    def test_it_stops_when_answers_take_longer_than_it_may_poll(self) -> None:
        spin = Spin(LIMIT_S, adaptive=True)
        now_s = 1.0
        for _ in range(20):
            now_s = exchange(spin, now_s, 2 * LIMIT_S)
        assert not spin.on_wait(now_s)

    def test_it_polls_less_where_no_answer_is_awaited(self) -> None:
        spin = Spin(LIMIT_S, adaptive=True)
        now_s = 1.0
        for _ in range(60):
            now_s = exchange(spin, now_s, LIMIT_S / 8)
        assert spin.on_wait(now_s, is_for_answer=False)
        for _ in range(60):
            now_s = exchange(spin, now_s, LIMIT_S / 2)
        assert spin.on_wait(now_s)
        assert not spin.on_wait(now_s, is_for_answer=False)

    def test_a_silence_in_which_no_answer_is_awaited_hardly_counts(self) -> None:
        spin = Spin(LIMIT_S, adaptive=True)
        now_s = 1.0
        for _ in range(60):
            now_s = exchange(spin, now_s, 20e-6)
        spin.on_wait(now_s, is_for_answer=False)
        spin.on_read(now_s + 3600.0)
        assert spin.on_wait(now_s + 3600.0, is_for_answer=False)

    def test_it_comes_back_when_answers_are_quick_again(self) -> None:
        spin = Spin(LIMIT_S, adaptive=True)
        now_s = 1.0
        for wait_s in [5.0] * 20 + [60e-6] * 30:
            now_s = exchange(spin, now_s, wait_s)
        assert spin.on_wait(now_s)

    def test_a_long_silence_counts_as_one_slow_answer(self) -> None:
        spin = Spin(LIMIT_S, adaptive=True)
        now_s = 1.0
        for wait_s in [20e-6] * 60 + [3600.0]:
            now_s = exchange(spin, now_s, wait_s)
        assert spin.on_wait(now_s)

    def test_a_core_that_others_want_is_left_to_them(self) -> None:
        spin = Spin(LIMIT_S, adaptive=True)
        spin.on_wait(1.0)
        assert not spin.on_look(1.0 + STOLEN_S + LOOK_S)
        spin.on_read(1.0 + STOLEN_S + 2 * LOOK_S)
        assert not spin.on_wait(1.0 + STOLEN_S + PAUSE_S / 2)
        assert spin.on_wait(1.0 + 2 * STOLEN_S + PAUSE_S)

    def test_what_is_done_with_an_answer_is_no_sign_of_others(self) -> None:
        spin = Spin(LIMIT_S, adaptive=True)
        spin.on_wait(1.0)
        spin.on_read(1.0 + LOOK_S)
        assert not spin.on_look(1.0 + 2 * STOLEN_S)
        assert spin.on_wait(1.0 + 3 * STOLEN_S)

    def test_each_time_in_a_row_it_keeps_away_for_longer(self) -> None:
        spin = Spin(1.0, adaptive=True)
        now_s, pauses = 1.0, []
        for _ in range(12):
            assert spin.on_wait(now_s)
            now_s += 2 * STOLEN_S
            assert not spin.on_look(now_s)
            stolen_s = now_s
            while not spin.on_wait(now_s):
                now_s += PAUSE_S / 4
            pauses.append(now_s - stolen_s)
        assert pauses[1] > 1.5 * pauses[0]
        assert max(pauses) == pytest.approx(PAUSE_MAX_S, rel=0.01)

    def test_an_answer_that_came_while_it_polled_ends_the_row(self) -> None:
        spin = Spin(LIMIT_S, adaptive=True)
        now_s = 1.0
        for _ in range(3):
            spin.on_wait(now_s)
            spin.on_look(now_s + 2 * STOLEN_S)
            now_s += 1.0
        now_s = exchange(spin, now_s, 20e-6)
        spin.on_wait(now_s)
        spin.on_look(now_s + 2 * STOLEN_S)
        assert spin.on_wait(now_s + 2 * STOLEN_S + 1.1 * PAUSE_S)
