"""The last minutes of a group."""

from __future__ import annotations

import pytest

from asyncrpc.serving.dashboard.machine.history import (
    HISTORY_S,
    MOMENTS_MAX,
    GroupHistory,
    Moment,
)


def moment(at_s: float, made_per_s: float | None = 1.0) -> Moment:
    return Moment(at_s, made_per_s, 0.5, 1000)


def times(history: GroupHistory) -> list[float]:
    return history.columns()["at_s"]


def test_it_begins_with_columns_of_nothing() -> None:
    assert GroupHistory().columns() == {
        "at_s": [],
        "made_per_s": [],
        "p99_s": [],
        "memory_bytes": [],
    }


def test_moments_are_told_column_by_column() -> None:
    history = GroupHistory()
    history.add(Moment(1.0, 2.0, None, 3))
    history.add(Moment(4.0, None, 0.5, 6))
    assert history.columns() == {
        "at_s": [1.0, 4.0],
        "made_per_s": [2.0, None],
        "p99_s": [None, 0.5],
        "memory_bytes": [3, 6],
    }


def test_what_is_older_than_the_history_is_forgotten() -> None:
    history = GroupHistory()
    for at_s in (0.0, 1.0, HISTORY_S):
        history.add(moment(at_s))
    assert times(history) == [0.0, 1.0, HISTORY_S]  # to the second
    history.add(moment(HISTORY_S + 1.0))
    assert times(history) == [1.0, HISTORY_S, HISTORY_S + 1.0]
    history.add(moment(10 * HISTORY_S))
    assert times(history) == [10 * HISTORY_S]


def test_there_are_so_many_moments_the_newest() -> None:
    history = GroupHistory()
    for number in range(MOMENTS_MAX + 5):
        history.add(moment(number / 10))
    assert len(times(history)) == MOMENTS_MAX
    assert times(history)[0] == 0.5


@pytest.mark.parametrize(("back_to", "left"), [(2.5, [1.0, 2.0]), (2.0, [1.0, 2.0])])
def test_a_clock_that_is_set_back_takes_what_was_after_it(
    back_to: float, left: list[float]
) -> None:
    history = GroupHistory()
    for at_s in (1.0, 2.0, 3.0, 4.0):
        history.add(moment(at_s))
    history.add(moment(back_to))
    assert times(history) == [*left, back_to]


def test_a_clock_that_is_set_back_before_all_begins_anew() -> None:
    history = GroupHistory()
    history.add(moment(5.0))
    history.add(moment(-5.0))
    assert times(history) == [-5.0]
