"""Whatever a program does, a metric has a bounded number of series."""

from __future__ import annotations

import itertools

from asyncrpc.tools.observability.series import (
    METHODS_MAX,
    OTHER,
    OUTCOMES_MAX,
    SERIES_MAX,
    VALUE_CHARACTERS_MAX,
    LabelCap,
    MetricSeries,
    Total,
)


def test_label_beyond_the_cap_is_other() -> None:
    cap = LabelCap(2)
    assert [cap.shown(label) for label in "abcab"] == ["a", "b", OTHER, "a", "b"]
    assert cap.shown("") == ""


def test_label_cap_of_zero_shows_no_label() -> None:
    assert LabelCap(0).shown("a") == OTHER


def test_capped_series_lose_no_count() -> None:
    series = MetricSeries(Total, [LabelCap(METHODS_MAX), LabelCap(OUTCOMES_MAX)])
    for method, outcome in itertools.product(range(10_000), range(30)):
        series.at(str(method), str(outcome)).value += 1
    counted = sum(total.value for total in series.by_values.values())
    assert counted == 300_000
    assert len(series.by_values) <= SERIES_MAX + OUTCOMES_MAX + 2
    assert {method for method, _ in series.by_values} <= {
        OTHER,
        *map(str, range(METHODS_MAX)),
    }


def test_overflowing_label_keeps_no_memory() -> None:
    cap = LabelCap(1)
    series = MetricSeries(Total, [cap])
    for number in range(1000):
        series.at(str(number))
    assert len(series.by_values) == 2
    assert len(vars(cap)["_known"]) == 2


def test_label_value_is_made_encodable_and_short() -> None:
    cap = LabelCap(3)
    assert cap.shown("\ud800") == "?"
    assert cap.shown("ü") == "ü"
    assert len(cap.shown("n" * 10_000)) == VALUE_CHARACTERS_MAX
