"""Two collections that both tables need: sets by key, and a memory of the dead."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Generic, TypeVar

from asyncrpc.ids import Incarnation

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

    def pop(self, key: K) -> Iterable[V]:
        return self._sets.pop(key, {})


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
