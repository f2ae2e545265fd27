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
    def test_poll_after_a_write_lasts_for_its_limit(self) -> None:
        spin = Spin(LIMIT_S, adaptive=False)
        assert spin.on_wait(1.0)
        assert polled_s(spin, 1.0) == pytest.approx(LIMIT_S, abs=2 * LOOK_S)

    def test_received_bytes_end_the_poll(self) -> None:
        spin = Spin(LIMIT_S, adaptive=False)
        spin.on_wait(1.0)
        spin.on_read(1.0 + 10e-6)
        assert not spin.on_look(1.0 + 12e-6)

    def test_bounded_poll_ignores_the_length_of_waits(self) -> None:
        spin = Spin(LIMIT_S, adaptive=False)
        now_s = 1.0
        for _ in range(50):
            now_s = exchange(spin, now_s, 1.0)
        assert spin.on_wait(now_s)


class TestAdaptive:
    def test_adaptive_poll_is_tried_first(self) -> None:
        assert Spin(LIMIT_S, adaptive=True).on_wait(0.0)

    def test_adaptive_poll_lasts_about_twice_the_recent_waits(self) -> None:
        spin = Spin(LIMIT_S, adaptive=True)
        now_s = 1.0
        for _ in range(60):
            now_s = exchange(spin, now_s, 30e-6)
        assert spin.on_wait(now_s)
        assert polled_s(spin, now_s) == pytest.approx(70e-6, abs=5e-6)

    def test_adaptive_poll_stops_when_waits_exceed_its_limit(self) -> None:
        spin = Spin(LIMIT_S, adaptive=True)
        now_s = 1.0
        for _ in range(20):
            now_s = exchange(spin, now_s, 2 * LIMIT_S)
        assert not spin.on_wait(now_s)

    def test_adaptive_poll_is_shorter_when_no_answer_is_awaited(self) -> None:
        spin = Spin(LIMIT_S, adaptive=True)
        now_s = 1.0
        for _ in range(60):
            now_s = exchange(spin, now_s, LIMIT_S / 8)
        assert spin.on_wait(now_s, is_for_answer=False)
        for _ in range(60):
            now_s = exchange(spin, now_s, LIMIT_S / 2)
        assert spin.on_wait(now_s)
        assert not spin.on_wait(now_s, is_for_answer=False)

    def test_silence_without_an_awaited_answer_hardly_counts(self) -> None:
        spin = Spin(LIMIT_S, adaptive=True)
        now_s = 1.0
        for _ in range(60):
            now_s = exchange(spin, now_s, 20e-6)
        spin.on_wait(now_s, is_for_answer=False)
        spin.on_read(now_s + 3600.0)
        assert spin.on_wait(now_s + 3600.0, is_for_answer=False)

    def test_adaptive_poll_resumes_when_answers_are_quick_again(self) -> None:
        spin = Spin(LIMIT_S, adaptive=True)
        now_s = 1.0
        for wait_s in [5.0] * 20 + [60e-6] * 30:
            now_s = exchange(spin, now_s, wait_s)
        assert spin.on_wait(now_s)

    def test_long_silence_counts_as_one_slow_answer(self) -> None:
        spin = Spin(LIMIT_S, adaptive=True)
        now_s = 1.0
        for wait_s in [20e-6] * 60 + [3600.0]:
            now_s = exchange(spin, now_s, wait_s)
        assert spin.on_wait(now_s)

    def test_poll_leaves_a_contended_core_alone(self) -> None:
        spin = Spin(LIMIT_S, adaptive=True)
        spin.on_wait(1.0)
        assert not spin.on_look(1.0 + STOLEN_S + LOOK_S)
        spin.on_read(1.0 + STOLEN_S + 2 * LOOK_S)
        assert not spin.on_wait(1.0 + STOLEN_S + PAUSE_S / 2)
        assert spin.on_wait(1.0 + 2 * STOLEN_S + PAUSE_S)

    def test_time_spent_on_an_answer_is_not_contention(self) -> None:
        spin = Spin(LIMIT_S, adaptive=True)
        spin.on_wait(1.0)
        spin.on_read(1.0 + LOOK_S)
        assert not spin.on_look(1.0 + 2 * STOLEN_S)
        assert spin.on_wait(1.0 + 3 * STOLEN_S)

    def test_repeated_contention_lengthens_the_pause(self) -> None:
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

    def test_answer_during_a_poll_resets_the_pause(self) -> None:
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
