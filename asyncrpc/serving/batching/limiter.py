"""A bounded number of blocks that run at once, and a bounded queue before them.

It is for handlers that need no batch.  Which of them may wait is decided as in a
`Batcher` whose batches have one item.

Source: see `machine.overload`.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from asyncrpc.core.arguments import check_choice, check_count
from asyncrpc.core.loop.loops import check_loop, loop_for
from asyncrpc.extend import Deadline
from asyncrpc.serving.batching import queues
from asyncrpc.serving.batching.machine.fair_queue import QueuedRequest
from asyncrpc.serving.batching.machine.overload import (
    DropReason,
    QueueLimits,
    ServiceQueue,
)
from asyncrpc.serving.batching.queues import (
    OVERFLOWS,
    PRIORITY_STEP_S,
    WAITING_MAX,
    Overflow,
    WakeTimer,
    check_queue,
    check_request,
    chosen_name,
    deadline_here,
)
from asyncrpc.serving.batching.statistics import (
    EndCounts,
    QueueStats,
    figures_of,
    show,
    stats_of,
)

_NO_CONTEXT: Final = contextvars.Context()  # the timer inherits no caller's context


@dataclass(slots=True, eq=False)
class _Entrant:
    """One block that wants to run."""

    turn: asyncio.Future[None]
    deadline: Deadline | None


class Limiter:
    """Lets a bounded number of blocks run at once; others wait, or are refused.

    Example:
        >>> limiter = Limiter(running_max=8, waiting_max=64, max_queue_age_s=0.5)
        >>> async def handler(request):
        ...     async with limiter.turn(client=request.remote):
        ...         return await answer(request)
    """

    def __init__(
        self,
        running_max: int,
        *,
        waiting_max: int = WAITING_MAX,
        max_queue_age_s: float | None = None,
        standing_queue_age_s: float | None = None,
        overflow: Overflow = "newest",
        priority_step_s: float = PRIORITY_STEP_S,
        name: str | None = None,
    ) -> None:
        """Describe a limiter.

        It belongs to the event loop that uses it first; the worker that is current then
        shows its figures among its metrics.

        Args:
            running_max: blocks that may run at the same time.
            waiting_max: blocks that may wait; more are rejected, or replace blocks of a
                lower priority, or of the client with the most blocks.
            max_queue_age_s: seconds that a block may wait in total; one that would wait
                longer, by the measured rate, is rejected.  None: no limit.
            standing_queue_age_s: the same limit while the queue has not been empty for
                `max_queue_age_s`.
            overflow: which block is rejected when too many wait: the "newest" one, at
                once, or the "oldest" one, of the client with the most blocks, so that
                the served blocks have waited the least.
            priority_step_s: seconds of head start that each step of priority gives.
            name: in errors and metrics.

        Raises:
            UsageError: an argument has the wrong type, or is out of range.
        """
        check_count("running_max", running_max, at_least=1)
        check_queue(waiting_max, max_queue_age_s, standing_queue_age_s, priority_step_s)
        check_choice("overflow", overflow, OVERFLOWS)
        self._name = chosen_name(name, type(self))
        self._queue: ServiceQueue[_Entrant] = ServiceQueue(
            QueueLimits(
                waiting_max=waiting_max,
                places=running_max,
                turn_max=1,
                max_age_s=max_queue_age_s,
                standing_age_s=standing_queue_age_s,
                priority_step_s=priority_step_s,
                evicts_oldest=overflow == "oldest",
            )
        )
        self._ends = EndCounts()
        self._timer = WakeTimer(self._pump)
        self._loop: asyncio.AbstractEventLoop | None = None

    @asynccontextmanager
    async def turn(
        self, *, priority: int = 0, client: Hashable = None
    ) -> AsyncIterator[None]:
        """Run a block when it is its turn.

        Args:
            priority: a higher one goes sooner: each step is a head start of
                `priority_step_s`.
            client: the owner of the block; clients of one priority have equal shares.

        Raises:
            OverloadedError: too many blocks wait, or this one would wait or has waited
                too long; its `retry_after_s` says when there should be room.
            DeadlineExceededError: the deadline passed while the block waited.
            UsageError: an argument has the wrong type, or the limiter belongs to
                another event loop.

        Cancellation:
            A block that waits gives up its place in the queue.
        """
        entrant = await self._enter(priority, client)
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            self._ends.left += 1
            self._queue.rate.drop(entrant)
            raise
        except BaseException:
            self._ends.failed += 1
            self._queue.rate.drop(entrant)
            raise
        else:
            self._ends.answered += 1
            self._queue.rate.end(entrant, 1, self._now_s())
        finally:
            self._pump()

    def stats(self) -> QueueStats:
        """Return what waits, what runs, and what has happened so far.

        Thread safety: from any thread, but the figures may be of different moments.
        """
        queue = self._queue
        now_s = 0.0 if self._loop is None else self._loop.time()
        return stats_of(queue, self._ends, queue.rate.running, now_s)

    async def _enter(self, priority: int, client: Hashable) -> _Entrant:
        """Wait for a turn; the caller must end it."""
        loop = loop_for("a Limiter")
        if self._loop is None:
            self._loop = loop
            context = contextvars.copy_context()
            show(self._name, lambda: figures_of(self.stats()), context)
        check_loop("the Limiter", self._loop, "it")
        check_request(priority, client)
        now_s = loop.time()
        deadline = deadline_here(self._queue, self._name, now_s)
        entrant = _Entrant(loop.create_future(), deadline)
        request = QueuedRequest(
            entrant,
            now_s,
            deadline_s=None if deadline is None else deadline.at_s,
            priority=priority,
            client=client,
        )
        evicted = queues.admitted(self._queue, request, now_s)
        if evicted is not None:
            self._drop(evicted, DropReason.EVICTED, now_s)
        self._pump()
        try:
            await entrant.turn  # an ending turn lets it in; or it is dropped
        except asyncio.CancelledError:
            self._give_up(request)
            raise
        return entrant

    def _give_up(self, request: QueuedRequest[_Entrant]) -> None:
        turn = request.subject.turn
        self._queue.remove(request)
        self._queue.rate.drop(request.subject)  # if its turn came in the same moment
        # If it was dropped at that moment, that has been counted; this reads the error.
        if turn.cancelled() or turn.exception() is None:
            self._ends.left += 1
        self._pump()

    def _pump(self, due_s: float = 0.0) -> None:
        """Drop the blocks that are due, and let in as many as may run."""
        now_s = max(self._now_s(), due_s)
        queue = self._queue
        for request, reason in queue.drop_due(now_s):
            self._drop(request, reason, now_s)
        while queue.waiting and queue.rate.has_place:
            (request,) = queue.take(None, 1, None)
            if not request.subject.turn.done():  # else its caller is about to give up
                queue.rate.begin(request.subject, now_s)
                request.subject.turn.set_result(None)
        self._timer.set(queue.drops_at_s, _NO_CONTEXT)

    def _drop(
        self, request: QueuedRequest[_Entrant], reason: DropReason, now_s: float
    ) -> None:
        """Tell a block that waited why it will not run."""
        entrant, queue = request.subject, self._queue
        error = queues.dropped(
            reason,
            deadline=entrant.deadline,
            name=self._name,
            age_s=now_s - request.came_s,
            retry_after_s=queue.rate.drain_s(len(queue.waiting), now_s),
        )
        if not entrant.turn.done():
            entrant.turn.set_exception(error)

    def _now_s(self) -> float:
        assert self._loop is not None  # a block has come
        return self._loop.time()
