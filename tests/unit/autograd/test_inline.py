"""What the loop does itself, since it is always short."""

from __future__ import annotations

from asyncrpc.autograd.inline import (
    KINDS_MAX,
    LATE_MAX,
    LONG_S,
    SHORT_S,
    TRIALS,
    InlinePolicy,
)


def test_only_what_has_always_been_short_is() -> None:
    pace = InlinePolicy()
    for _ in range(TRIALS):
        assert not pace.is_short("a")
        pace.note("a", SHORT_S / 2)
    assert pace.is_short("a")
    assert not pace.is_short("b")


def test_a_slow_trial_begins_anew() -> None:
    pace = InlinePolicy()
    pace.note("a", SHORT_S / 2)
    pace.note("a", 2 * SHORT_S)
    for _ in range(TRIALS - 1):
        pace.note("a", SHORT_S / 2)
    assert not pace.is_short("a")
    pace.note("a", SHORT_S / 2)
    assert pace.is_short("a")


def test_what_has_held_up_the_loop_often_never_does_again() -> None:
    pace = InlinePolicy()
    for late in range(1, LATE_MAX + 1):
        for _ in range(TRIALS):
            pace.note("a", 0.0)
        assert pace.is_short("a")
        pace.note("a", (SHORT_S + LONG_S) / 2)  # a little late: it stays
        assert pace.is_short("a")
        pace.note("a", 2 * LONG_S)
        assert not pace.is_short("a"), late
    for _ in range(2 * TRIALS):
        pace.note("a", 0.0)
    assert not pace.is_short("a")


def test_so_many_kinds_are_remembered() -> None:
    pace = InlinePolicy()
    for _ in range(TRIALS):
        pace.note("first", 0.0)
    for kind in range(KINDS_MAX):
        pace.note(kind, 0.0)
    assert not pace.is_short("first")
