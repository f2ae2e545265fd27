"""One request for a sequence, with the items that its consumer has not taken yet."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import Any, Final, Generic, TypeVar

from asyncrpc.extend import CallSpan, Deadline
from asyncrpc.serving.batching.machine.fair_queue import QueuedRequest
from asyncrpc.serving.batching.machine.sequences import ModelSequence

R = TypeVar("R")
T = TypeVar("T")

END: Final = object()


class Generation(Generic[R, T]):
    """One request, from its arrival until its consumer has the last item.

    Attributes:
        request: the argument of the model's `enter`.
        queued: its place in the queue before the model; set by the creator.
        span: its span in a trace, if there is one; set by the creator.
        state: the model's state of it, while it is inside.
        paused_s: when its consumer fell behind, if it is behind.
        is_over: no further item will come.
        consumed: number of items that its consumer has taken.
    """

    __slots__ = (
        *("_arrived", "_error", "_items", "_items_max"),
        *("consumed", "deadline", "is_over", "paused_s", "queued", "request"),
        *("sequence", "span", "state"),
    )

    def __init__(
        self,
        request: R,
        deadline: Deadline | None,
        *,
        memory: int,
        items_max: int,
    ) -> None:
        self.request = request
        self.deadline = deadline
        self.sequence: ModelSequence[Generation[R, T]] = ModelSequence(self, memory)
        self.queued: QueuedRequest[Generation[R, T]]
        self.span: CallSpan | None = None
        self.state: Any = None
        self.paused_s = 0.0
        self.is_over = False
        self.consumed = 0
        self._items: deque[T] = deque()
        self._items_max = items_max
        self._error: BaseException | None = None
        self._arrived = asyncio.Event()

    @property
    def is_behind(self) -> bool:
        """Return whether the maximum of items waits."""
        return len(self._items) >= self._items_max

    def put(self, items: Iterable[T]) -> None:
        """Hand items over."""
        self._items.extend(items)
        self._arrived.set()

    def end(self, error: BaseException | None = None) -> None:
        """End the items; an error is raised after those that have arrived."""
        if not self.is_over:
            self.is_over = True
            self._error = error
            self._arrived.set()

    def forget(self) -> None:
        """Drop the items: the consumer has gone."""
        self.is_over = True
        self._items.clear()

    async def take(self) -> Any:
        """Return the next item, or `END`."""
        while not self._items:
            if self.is_over:
                if self._error is not None:
                    raise self._error
                return END
            self._arrived.clear()
            await self._arrived.wait()  # the end of the sequence sets it
        self.consumed += 1
        return self._items.popleft()
