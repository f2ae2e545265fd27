"""The states of a dial, and the window that bounds how many there are."""

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
from asyncrpc.core.links.machine.dialing import (
    ATTEMPTS_MAX,
    FINAL,
    PAUSE_FOR_ABSENT_S,
    PAUSES_AFTER_BREAK_S,
    TRANSITIONS,
    DialAttempts,
    DialEvent,
    DialState,
)
from asyncrpc.errors import LocalProtocolError

READY, DIALING, PAUSED = DialState.READY, DialState.DIALING, DialState.PAUSED


def after(*events: DialEvent) -> DialAttempts:
    attempts = DialAttempts()
    for event in events:
        attempts.on(event)
    return attempts


def test_impossible_event_is_a_fault_of_the_service() -> None:
    with pytest.raises(LocalProtocolError, match=r"a dial .* 'the connection is open'"):
        after(DialEvent.OPENED)


def walks(depth: int) -> list[tuple[DialEvent, ...]]:
    """Return every sequence of events of a dial, up to so many, that is not over."""
    sequences: list[tuple[DialEvent, ...]] = [()]
    level: list[tuple[DialEvent, ...]] = [()]
    for _ in range(depth):
        level = [
            (*events, event)
            for events in level
            for event in TRANSITIONS[after(*events).state]
        ]
        sequences += level
    return sequences


def test_attempts_are_counted_by_returns_to_the_ready_state() -> None:
    for events in walks(7):
        states = [after(*events[:end]).state for end in range(len(events) + 1)]
        returns = sum(
            now is READY and before is not READY
            for before, now in itertools.pairwise(states)
        )
        attempts = after(*events)
        assert attempts.number == returns
        spared = events.count(DialEvent.BUSY) + events.count(DialEvent.ABSENT)
        counted = returns - spared
        assert attempts.is_exhausted == (counted >= ATTEMPTS_MAX)
        assert attempts.is_over == (attempts.state in FINAL)


def test_repeated_breaks_in_the_handshake_lengthen_the_pause() -> None:
    attempts = DialAttempts()
    pauses_s = []
    for _ in PAUSES_AFTER_BREAK_S:
        attempts.on(DialEvent.FREE)
        attempts.on(DialEvent.BROKE)
        assert attempts.state is PAUSED
        pauses_s.append(attempts.pause_s)
        attempts.on(DialEvent.SETTLED)
    assert pauses_s == list(PAUSES_AFTER_BREAK_S) == sorted(pauses_s)


def test_break_after_the_last_pause_counts_as_a_failure() -> None:
    attempts = DialAttempts()
    for _ in PAUSES_AFTER_BREAK_S:
        for event in (DialEvent.FREE, DialEvent.BROKE, DialEvent.SETTLED):
            attempts.on(event)
    attempts.on(DialEvent.FREE)
    attempts.on(DialEvent.BROKE)
    assert attempts.state is DialState.ASKING


def test_busy_peer_is_dialed_without_limit_and_a_late_one_with() -> None:
    late = (DialEvent.FREE, DialEvent.UNANSWERED, DialEvent.TICKING)
    busy = (*late[:2], DialEvent.BUSY)
    assert not after(*busy * 1000).is_exhausted
    assert not after(*busy, *late * (ATTEMPTS_MAX - 1)).is_exhausted
    assert after(*busy, *late * ATTEMPTS_MAX).is_exhausted


def test_absent_peer_is_dialed_for_a_limited_time() -> None:
    attempts = DialAttempts(absent_s_max=3.0)
    waited_s = 0.0
    attempts.on(DialEvent.FREE)
    attempts.on(DialEvent.ABSENT)
    while attempts.state is PAUSED and waited_s < 10.0:
        waited_s += attempts.pause_s
        attempts.on(DialEvent.SETTLED)
        assert not attempts.is_exhausted
        attempts.on(DialEvent.FREE)
        attempts.on(DialEvent.ABSENT)
    assert attempts.state is DialState.ASKING
    assert 3.0 <= waited_s < 3.0 + 2 * PAUSE_FOR_ABSENT_S


def test_other_failures_use_up_no_pause() -> None:
    attempts = after(DialEvent.FREE, DialEvent.UNREACHED, DialEvent.MOVED)
    attempts.on(DialEvent.FREE)
    attempts.on(DialEvent.BROKE)
    assert attempts.state is PAUSED
    assert attempts.pause_s == PAUSES_AFTER_BREAK_S[0]


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
