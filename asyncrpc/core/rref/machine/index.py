"""Two collections that both tables need: sets by key, and a memory of the dead."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable
from typing import Final, Generic, TypeVar

from asyncrpc.core.ids import Incarnation

# A dead worker is remembered so that a message of its last moments, still being
# decoded, revives nothing.  That takes seconds; so many deaths take far longer.
TOMBSTONES_MAX: Final = 4096

K = TypeVar("K")
V = TypeVar("V")


class Index(Generic[K, V]):
    """Sets by key, in order of insertion; an empty one takes no room."""

    def __init__(self) -> None:
        self._sets: dict[K, dict[V, None]] = {}

    def __len__(self) -> int:
        return len(self._sets)

    def add(self, key: K, value: V) -> None:
        self._sets.setdefault(key, {})[value] = None

    def discard(self, key: K, value: V) -> None:
        values = self._sets.get(key)
        if values is not None:
            values.pop(value, None)
            if not values:
                del self._sets[key]

    def get(self, key: K) -> Iterable[V]:
        """Return a copy of a set: what is in it may go while it is walked."""
        return tuple(self._sets.get(key, ()))

    def count(self, key: K) -> int:
        """Return how large a set is."""
        return len(self._sets.get(key, ()))

    def pop(self, key: K, at_most: int = sys.maxsize) -> Iterable[V]:
        """Take out the first values of a set; all, unless told otherwise."""
        values = self._sets.get(key, {})
        if len(values) <= at_most:
            return self._sets.pop(key, {})
        first = tuple(itertools.islice(values, at_most))
        for value in first:
            del values[value]
        return first


class Tombstones:
    """The last `TOMBSTONES_MAX` incarnations that were lost, and have not come back."""

    def __init__(self) -> None:
        self._dead: dict[Incarnation, None] = {}

    def __contains__(self, incarnation: Incarnation | None) -> bool:
        return incarnation in self._dead

    def add(self, incarnation: Incarnation) -> None:
        self._dead[incarnation] = None
        if len(self._dead) > TOMBSTONES_MAX:
            del self._dead[next(iter(self._dead))]

    def discard(self, incarnation: Incarnation) -> None:
        """Forget an incarnation that was not dead."""
        self._dead.pop(incarnation, None)
