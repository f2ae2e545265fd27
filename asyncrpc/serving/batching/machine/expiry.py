"""Things with an expiry time; those that leave earlier cost nothing."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Container, Iterator
from typing import Final, Generic, TypeVar

T = TypeVar("T")

_STALE_MAX: Final = 64  # entries of things that have left, beyond those still here


class ExpiryHeap(Generic[T]):
    """Which of the things in a container have expired, and when the next one will."""

    __slots__ = ("_compact_above", "_container", "_heap", "_serials")

    def __init__(self, container: Container[T]) -> None:
        """Begin with nothing to watch.

        Args:
            container: of the things; one that has left it does not expire.
        """
        self._container = container
        self._heap: list[tuple[float, int, T]] = []
        self._serials = itertools.count()
        self._compact_above = _STALE_MAX

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, at_s: float, thing: T) -> None:
        """Watch a thing that is in the container."""
        if len(self._heap) > self._compact_above:
            self._compact()
        heapq.heappush(self._heap, (at_s, next(self._serials), thing))

    def due(self, now_s: float) -> Iterator[T]:
        """Yield expired things; the caller removes each from the container at once."""
        while (at_s := self.next_s) is not None and at_s <= now_s:
            yield heapq.heappop(self._heap)[2]

    @property
    def next_s(self) -> float | None:
        """When the next thing expires; None: nothing is left."""
        while self._heap and self._heap[0][2] not in self._container:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def _compact(self) -> None:
        """Drop the entries of things that have left, in amortized constant time."""
        self._heap = [entry for entry in self._heap if entry[2] in self._container]
        heapq.heapify(self._heap)
        self._compact_above = 2 * len(self._heap) + _STALE_MAX
