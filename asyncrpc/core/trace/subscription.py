"""Events as they come, for a program: a bounded queue that drops the oldest."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar

from asyncrpc.core.trace.ring import EventRing, Fields, Sink
from asyncrpc.errors import UsageError

E = TypeVar("E", bound=tuple[Any, ...])

ITEMS_MAX: Final = 10_000
"""Default number of events that a subscription buffers."""


class Subscription(Generic[E]):
    """The events of some kinds from now on; `async for` waits for them.

    If `items_max` events wait, a new one pushes out the oldest.  The subscriber never
    delays the worker.  `close`, the end of a `with` block, or the end of the worker
    ends the subscription; the events that have come by then can still be taken.

    Attributes:
        dropped: how many events were pushed out.
        is_closed: whether no more events will come.

    Example:
        >>> with worker.subscribe(trace.LinkChanged) as events:
        ...     async for event in events:
        ...         print(event.peer.name, event.change, event.reason)
    """

    def __init__(
        self, rings: Sequence[EventRing[E]], items_max: int, *, with_recent: bool
    ) -> None:
        """Listen to rings; see `Worker.subscribe`."""
        self.dropped = 0
        self._queue: deque[E] = deque(maxlen=items_max)
        self._items_max = items_max
        self._waiter: asyncio.Future[None] | None = None
        self.is_closed = False
        if with_recent:
            recent = [event for ring in rings for event in ring.recent]
            self._queue.extend(sorted(recent, key=_time_of))
        self._sinks: list[tuple[EventRing[E], Sink]] = []
        for ring in rings:
            sink = self._sink_for(ring)
            self._sinks.append((ring, sink))
            ring.add_sink(sink)

    def _sink_for(self, ring: EventRing[E]) -> Sink:
        make, queue = ring.make, self._queue

        def take(fields: Fields) -> None:
            if len(queue) == self._items_max:
                self.dropped += 1
            queue.append(make(fields))
            if self._waiter is not None:
                self._wake()

        return take

    def _wake(self) -> None:
        """Wake the waiting task; an event may come in any thread."""
        waiter, self._waiter = self._waiter, None
        if waiter is None:
            return
        try:
            waiter.get_loop().call_soon_threadsafe(_set, waiter)
        except RuntimeError:  # the loop of the waiting task is closed
            return

    def take(self) -> list[E]:
        """Return the events that have come, possibly none, without waiting.

        Thread safety: from any thread.
        """
        events: list[E] = []
        while self._queue:
            try:
                events.append(self._queue.popleft())
            except IndexError:  # another thread took it
                break
        return events

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> E:
        """Wait for the next event.

        Raises:
            UsageError: another task already waits, or no event loop runs here.
            StopAsyncIteration: it is closed, and all events have been taken.

        Cancellation:
            No event is lost.
        """
        while not self._queue:
            if self.is_closed:
                raise StopAsyncIteration
            if self._waiter is not None and not self._waiter.done():
                raise UsageError(
                    "another task waits for the next event of this subscription; "
                    "subscribe once for each task"
                )
            waiter = self._waiter = _future()
            if self._queue or self.is_closed:  # changed by another thread meanwhile
                self._waiter = None
                continue
            try:
                await waiter  # `close`, which the worker's end calls, ends it
            finally:
                if self._waiter is waiter:
                    self._waiter = None
        return self._queue.popleft()

    def close(self) -> None:
        """Take no more events.  Idempotent.

        Thread safety: from any thread.
        """
        self.is_closed = True
        while self._sinks:
            ring, sink = self._sinks.pop()
            ring.remove_sink(sink)
        self._wake()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else "open"
        return f"<Subscription {state}, {len(self._queue)} events>"


def _time_of(event: tuple[Any, ...]) -> float:
    at_s: float = event[0]
    return at_s


def _future() -> asyncio.Future[None]:
    try:
        return asyncio.get_running_loop().create_future()
    except RuntimeError:
        raise UsageError(
            "waiting for the next event needs a running event loop: wait in a "
            "coroutine, or use `take`, which does not wait"
        ) from None


def _set(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
