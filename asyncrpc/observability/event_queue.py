"""Events on their way from the flight recorder into figures.

Who notes an event only appends it to a queue: no lock, no wait, from any thread.  Now
and then that thread folds what has come into the figures, if no other is at it; else
the next one does, or whoever reads the figures.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeAlias

Fields: TypeAlias = tuple[Any, ...]

# Of events that are folded together: 32 cost 13 us, which no call notices; and the loop
# over them makes each cheaper than if it came alone.
FOLDED_MIN: Final = 32


class EventQueue:
    """Events of one kind that are not in the figures yet; few."""

    __slots__ = ("_fold", "_lock", "_pending")

    def __init__(
        self, fold: Callable[[Iterable[Fields]], None], lock: threading.Lock
    ) -> None:
        """Begin empty.

        Args:
            fold: takes events into the figures.
            lock: held by whoever folds or reads; several queues may share it.
        """
        self._fold = fold
        self._lock = lock
        self._pending: deque[Fields] = deque()

    def put(self, fields: Fields) -> None:
        """Take an event; never waits.

        Thread safety: from any thread.
        """
        self._pending.append(fields)
        if len(self._pending) >= FOLDED_MIN and self._lock.acquire(blocking=False):
            try:
                self.drain()
            finally:
                self._lock.release()

    def drain(self) -> None:
        """Fold what has come; the lock is held."""
        take = self._pending.popleft
        self._fold([take() for _ in range(len(self._pending))])
