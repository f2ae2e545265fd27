"""The latencies of the last calls, and their quantiles, in constant memory.

A histogram with buckets that grow by 9 %, in two halves: when the younger half is full,
the older is forgotten.  So a quantile is of the last 500 to 1,000 calls, and accurate
to 9 %, whatever the latencies are.

A call that was given up, because another answered in its place, counts with the time
that it ran: it would have taken at least that long.  Otherwise the slow calls would be
missing, and each quantile would be too low.

Source: buckets that grow by a factor are those of C. Masson, J. Rim, H. Lee,
"DDSketch", VLDB 2019.
"""

from __future__ import annotations

import math
from typing import Final

FIRST_S: Final = 1e-5  # shorter latencies count as this
PER_DOUBLING: Final = 8  # buckets; each is 9 % wide
BUCKETS: Final = 27 * PER_DOUBLING  # up to 1,300 s; longer latencies count as that
HALF_MAX: Final = 512  # calls
CALLS_MIN: Final = 32  # calls; a high quantile of fewer says nothing
REFRESH_EVERY: Final = 16  # calls after which the quantile is found anew


class LatencyWindow:
    """The latencies of the last calls of one function."""

    __slots__ = ("_cached", "_older", "_quantile", "_recorded", "_stale", "_younger")

    def __init__(self, quantile: float) -> None:
        self._quantile = quantile
        self._younger, self._older = [0] * BUCKETS, [0] * BUCKETS
        self._recorded = 0  # in the younger half
        self._stale = 0  # calls until the quantile is found anew
        self._cached = math.inf

    @property
    def count(self) -> int:
        """Return how many calls are in the window."""
        return sum(self._younger) + sum(self._older)

    def record(self, latency_s: float) -> None:
        """Add the latency of one call, in seconds."""
        if self._recorded == HALF_MAX:
            self._older, self._younger = self._younger, [0] * BUCKETS
            self._recorded = 0
        self._younger[bucket_of(latency_s)] += 1
        self._recorded += 1
        self._stale -= 1

    @property
    def quantile_s(self) -> float:
        """Return the quantile, in seconds; infinite with too few calls."""
        if self._stale <= 0:
            self._stale = REFRESH_EVERY
            self._cached = self._find()
        return self._cached

    def _find(self) -> float:
        total = self.count
        if total < CALLS_MIN:
            return math.inf
        wanted, seen = self._quantile * total, 0
        for bucket, young in enumerate(self._younger):
            seen += young + self._older[bucket]
            if seen >= wanted:
                return end_of(bucket)
        return end_of(BUCKETS - 1)  # of a quantile of 1 and rounding


def bucket_of(latency_s: float) -> int:
    """Return the bucket of a latency, in seconds."""
    if latency_s <= FIRST_S:
        return 0
    bucket = math.ceil(math.log2(latency_s / FIRST_S) * PER_DOUBLING)
    return min(bucket, BUCKETS - 1)


def end_of(bucket: int) -> float:
    """Return the longest latency of a bucket, in seconds."""
    return FIRST_S * math.exp2(bucket / PER_DOUBLING)
