"""Histograms count each value in one bucket, whose bound it does not exceed."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrpc.tools.observability.histograms import (
    BYTES_BOUNDS,
    ITEMS_BOUNDS,
    SECONDS_BOUNDS,
    Histogram,
)


@pytest.mark.parametrize("bounds", [SECONDS_BOUNDS, BYTES_BOUNDS, ITEMS_BOUNDS])
def test_histogram_bounds_ascend(bounds: tuple[float, ...]) -> None:
    assert all(bound < next_one for bound, next_one in pairwise(bounds))


def test_bound_belongs_to_its_bucket() -> None:
    histogram = Histogram((1.0, 2.0))
    histogram.observe((0.0, 1.0, 1.5, 2.0, 2.1))
    assert histogram.counts == [2, 2, 1]
    assert histogram.cumulative() == [2, 4, 5]
    assert histogram.total == pytest.approx(6.6)


@given(st.lists(st.floats(0, 1e9, allow_nan=False)))
def test_cumulative_count_is_the_values_up_to_the_bound(values: list[float]) -> None:
    histogram = Histogram(SECONDS_BOUNDS)
    histogram.observe(values)
    expected = [sum(value <= bound for value in values) for bound in SECONDS_BOUNDS]
    assert histogram.cumulative() == [*expected, len(values)]
