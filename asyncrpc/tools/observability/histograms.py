"""Histograms: the number of values between fixed bounds, and the sum of the values.

The bounds of a metric never change, so the histograms of several workers can be added
up.  A histogram takes a list of integers, whatever is observed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Final

# Seconds.  OpenTelemetry advises for calls to begin at 5 ms; our calls take 0.1 ms, and
# a training step takes minutes.
SECONDS_BOUNDS: Final = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 100.0),
)
# Bytes: from 1 KiB in steps of 8 up to 2 GiB.
BYTES_BOUNDS: Final = tuple(float(1 << power) for power in range(10, 32, 3))
ITEMS_BOUNDS: Final = (0.0, *(float(10**power) for power in range(7)))


class Histogram:
    """One histogram.

    Attributes:
        bounds: inclusive upper bounds of the buckets, ascending.  One more bucket has
            the values above the last bound.
        counts: how many values lay in each bucket.
        total: sum of the values.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, values: Iterable[float]) -> None:
        """Count values of at least 0.

        Counting several at once takes a third of the time for each.
        """
        bounds, counts = self.bounds, self.counts
        total = self.total
        for value in values:
            counts[bisect_left(bounds, value)] += 1
            total += value
        self.total = total

    def cumulative(self) -> list[int]:
        """Return how many values were at most each bound, and last the total number."""
        return list(accumulate(self.counts))
