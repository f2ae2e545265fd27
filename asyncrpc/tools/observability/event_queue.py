"""Events on their way from the flight recorder into figures.

Noting an event only appends it to a queue: without a lock or a wait, from any thread.
Now and then the noting thread folds the queue into the figures, unless another thread
is doing so; otherwise a later event or the next reader folds it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeAlias

Fields: TypeAlias = tuple[Any, ...]

# Events that are folded together: 64 take 30 us, for which a call can wait.  An event
# costs 0.5 us so, or 0.8 that of a served call; folded alone it would be 1.5 and 2.4.
FOLDED_MIN: Final = 64


class EventQueue:
    """Events of one kind that are not in the figures yet; few."""

    __slots__ = ("_fold", "_lock", "_pending")

    def __init__(
        self, fold: Callable[[Iterable[Fields]], None], lock: threading.Lock
    ) -> None:
        """Begin empty.

        Args:
            lock: held while folding or reading; several queues may share it.
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
        """Fold the queued events; the caller holds the lock."""
        take = self._pending.popleft
        self._fold([take() for _ in range(len(self._pending))])
