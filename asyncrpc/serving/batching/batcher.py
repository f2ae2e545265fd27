"""Many small requests in one remote call.

A request waits until a batch is full or its oldest request has waited long enough.
While the maximum of batches runs, the next one gathers requests, so batches grow with
the load.  `machine.batches` decides which requests go together, and which may wait.

Invariants: every request gets one answer or one error, never another's; a batch runs
only as long as some request waits for it.

How many bytes an item has: of its tensors, arrays and byte strings.

Source: E. Crankshaw et al., "Clipper: A Low-Latency Online Prediction Serving System",
NSDI 2017, section 4.3 (delayed batching).
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections.abc import Awaitable, Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar

import torch

from asyncrpc.core.arguments import (
    check_callable,
    check_choice,
    check_count,
    check_duration,
)
from asyncrpc.core.calls.context import deadline_var
from asyncrpc.core.loop.loops import loop_for
from asyncrpc.core.loop.threads import settable
from asyncrpc.core.torch_modes import alone
from asyncrpc.errors import Outcome, RejectedError, UsageError
from asyncrpc.extend import CallTracer, Deadline
from asyncrpc.serving.batching import queues
from asyncrpc.serving.batching.machine.fair_queue import QueuedRequest
from asyncrpc.serving.batching.machine.overload import (
    BatchLimits,
    BatchQueue,
    DropReason,
    QueueLimits,
)
from asyncrpc.serving.batching.queues import (
    OVERFLOWS,
    PRIORITY_STEP_S,
    WAITING_MAX,
    Overflow,
    WakeTimer,
    batches_of,
    check_queue,
    check_request,
    checked_answers,
    checked_callable,
    chosen_name,
    deadline_here,
    entered_loop,
    hashable,
    name_of,
    tracer_in,
)
from asyncrpc.serving.batching.statistics import (
    EndCounts,
    QueueStats,
    figures_of,
    show,
    stats_of,
)

_DEPTH_MAX: Final = 8  # nested containers; deeper items do not count


def bytes_of(item: Any, *, depth: int = _DEPTH_MAX) -> int:
    """Return the bytes of the tensors, arrays and byte strings in an item.

    It looks into lists, tuples and dicts.  Everything else counts as 0: it is small
    compared with a model's data, or its size is unknown.
    """
    if isinstance(item, torch.Tensor):
        return item.numel() * item.element_size()
    if isinstance(item, bytes | bytearray):
        return len(item)
    if isinstance(item, memoryview):
        return item.nbytes
    if isinstance(item, list | tuple | Mapping):
        if not depth:
            return 0
        parts = item.values() if isinstance(item, Mapping) else item
        return sum(bytes_of(part, depth=depth - 1) for part in parts)
    nbytes = getattr(item, "nbytes", 0)  # of arrays
    return nbytes if type(nbytes) is int else 0


A = TypeVar("A")
B = TypeVar("B")


@dataclass(slots=True, eq=False)  # compared by identity: items may be equal
class _BatchItem(Generic[A, B]):
    """One request."""

    item: A
    answer: asyncio.Future[B]
    deadline: Deadline | None
    trace: Any = None  # of the caller, from its worker's tracer
    batch: _Batch[A, B] | None = None

    def fail(self, error: BaseException) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


@dataclass(slots=True, eq=False)
class _Batch(Generic[A, B]):
    """Requests that run as one call."""

    members: Sequence[_BatchItem[A, B]]
    task: asyncio.Task[None] | None = None
    is_typical: bool = False  # it has ended normally: its time counts

    def cancel_if_unwanted(self) -> None:
        if self.task and all(member.answer.done() for member in self.members):
            self.task.cancel()


class Batcher(Generic[A, B]):
    """A function of many items, called with one item at a time.

    An asynchronous context manager; in an application, enter it after the worker.  The
    function runs in the context in which the batcher was entered, with the worker that
    was current there; the deadline of a batch is the latest one of its items.

    Example:
        >>> async def predict(rows: list[torch.Tensor]) -> torch.Tensor:
        ...     return await model.rpc_async().forward(torch.stack(rows))
        >>> async with Batcher(predict, max_size=32, max_wait_s=0.005) as batched:
        ...     logits = await batched(row)
    """

    def __init__(
        self,
        function: Callable[[list[A]], Awaitable[Collection[B | BaseException]]],
        max_size: int,
        max_wait_s: float,
        *,
        waiting_max: int = WAITING_MAX,
        batches_max: int = 1,
        max_bytes: int | None = None,
        size_of: Callable[[A], int] = bytes_of,
        bucket: Callable[[A], Hashable] | None = None,
        max_queue_age_s: float | None = None,
        standing_queue_age_s: float | None = None,
        overflow: Overflow = "newest",
        priority_step_s: float = PRIORITY_STEP_S,
        warm_up: Sequence[Sequence[A]] = (),
        name: str | None = None,
    ) -> None:
        """Describe a batcher; `async with` starts it.

        Args:
            function: gets 1 to `max_size` items and returns a list of as many answers,
                in order; a tensor or array `(items, ...)` counts as its rows.  An
                exception in the place of an answer is raised only to the caller of
                that item.
            max_size: items in a batch.
            max_wait_s: seconds that an item waits for others while nothing else holds
                it back; 0 sends it at once.
            waiting_max: items that may wait; more are rejected, or replace items of a
                lower priority, or of the client with the most items.
            batches_max: batches that may run at the same time.
            max_bytes: of all items in a batch; None: no limit.
            size_of: returns the bytes of an item; by default those of its tensors,
                arrays and byte strings.
            bucket: returns what items of one batch have in common, such as their shape;
                None: all go together.
            max_queue_age_s: seconds that an item may wait in total.  An item that would
                wait longer, by the measured rate, is rejected at once; one that has
                waited longer, by more than the time of a batch, is rejected then.  The
                time of a batch is a good choice: an answered item then takes at most
                about twice as long as it would alone.  None: no limit.
            standing_queue_age_s: the same limit while the queue has not been empty for
                `max_queue_age_s`; if it is short, only bursts may wait for long.
            overflow: which item is rejected when too many wait: the "newest" one, at
                once, or the "oldest" one, of the client with the most items, so that
                the served items have waited the least.
            priority_step_s: seconds of head start that each step of priority gives.
            warm_up: batches that the function is called with before any request, such
                as to compile; their answers are dropped.
            name: in errors and metrics; by default that of the function.

        Raises:
            UsageError: an argument has the wrong type, or is out of range.
        """
        check_callable("function", function)
        check_count("max_size", max_size, at_least=1)
        check_duration("max_wait_s", max_wait_s)
        check_count("batches_max", batches_max, at_least=1)
        if max_bytes is not None:
            check_count("max_bytes", max_bytes, at_least=1)
        check_callable("size_of", size_of)
        checked_callable("bucket", bucket)
        check_queue(waiting_max, max_queue_age_s, standing_queue_age_s, priority_step_s)
        check_choice("overflow", overflow, OVERFLOWS)
        self._function = function
        self._batch = BatchLimits(max_size, max_wait_s, max_bytes)
        self._size_of = size_of
        self._bucket = bucket
        self._warm_up = batches_of("warm_up", warm_up, max_size)
        self._name = chosen_name(name, function)
        self._whose = f"the function {name_of(function)!r} of a Batcher"
        self._batches: BatchQueue[_BatchItem[A, B]] = BatchQueue(
            self._batch,
            QueueLimits(
                waiting_max=waiting_max,
                places=batches_max,
                turn_max=max_size,
                max_age_s=max_queue_age_s,
                standing_age_s=standing_queue_age_s,
                priority_step_s=priority_step_s,
                evicts_oldest=overflow == "oldest",
            ),
        )
        self._queue = self._batches.queue
        self._ends = EndCounts()
        self._running: dict[asyncio.Task[None], _Batch[A, B]] = {}
        self._timer = WakeTimer(self._pump)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closing = False

    async def __aenter__(self) -> Self:
        """Warm up, then be ready for requests on this loop.

        Raises:
            UsageError: no event loop runs here.
            Exception: what the function raised for a batch of `warm_up`.

        Cancellation:
            The batcher is not entered.
        """
        loop = loop_for("a Batcher")
        self._context = contextvars.copy_context()
        for items in self._warm_up:
            await self._call(list(items))  # the program's function ends it
        self._loop = loop
        self._hide = show(self._name, self._figures, self._context)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Answer the waiting items, and take no more; if the block raised, abort.

        Raises:
            UsageError: it was entered on another event loop; it stays open.

        Cancellation:
            Running batches are cancelled, and their items get a `RejectedError`.
        """
        entered_loop("Batcher", self._loop, is_closing=False)
        self._is_closing = True
        try:
            if error is None:
                self._pump()
                while self._running:
                    await asyncio.wait(self._running)  # the program's function ends
        finally:
            self._hide()
            await self._abort()

    async def __call__(
        self, item: A, *, priority: int = 0, client: Hashable = None
    ) -> B:
        """Return the function's answer to one item.

        Args:
            item: goes into a batch with others.
            priority: a higher one goes sooner: each step is a head start of
                `priority_step_s`.
            client: the owner of the item; clients of one priority have equal shares.

        Returns:
            The answer at the item's place.

        Raises:
            OverloadedError: too many items wait, or this one would wait or has waited
                too long; its `retry_after_s` says when there should be room.
            DeadlineExceededError: the deadline passed while the item waited; it did not
                run.
            RejectedError: the batcher has been closed.
            UsageError: an argument has the wrong type; or the item is larger than
                `max_bytes`; or the function returned more or fewer answers than it got
                items; or the batcher was entered on another event loop.
            NotStartedError: the batcher has not been entered.
            Exception: what the function raised, for every item of the batch; or what it
                returned in the place of an answer, only for that item.

        Cancellation:
            The item leaves its batch; the others stay.  A batch whose requests have all
            gone is cancelled, and so is its call.
        """
        request = self._join(item, priority, client)
        member = request.subject
        try:
            return (
                await member.answer
            )  # the end of its batch, or `_abort`, completes it
        except asyncio.CancelledError:
            self._leave(request)
            raise

    @property
    def waiting(self) -> int:
        """How many items wait for a batch."""
        return len(self._queue.waiting)

    def stats(self) -> QueueStats:
        """Return what waits, what runs, and what has happened so far.

        Thread safety: from any thread, but the figures may be of different moments.
        """
        running = sum(len(batch.members) for batch in tuple(self._running.values()))
        now_s = 0.0 if self._loop is None else self._loop.time()
        return stats_of(self._queue, self._ends, running, now_s)

    def _figures(self) -> Mapping[str, float]:
        return figures_of(self.stats())

    # --- coming and going ------------------------------------------------------------

    def _join(
        self, item: A, priority: int, client: Hashable
    ) -> QueuedRequest[_BatchItem[A, B]]:
        loop = entered_loop("Batcher", self._loop, is_closing=self._is_closing)
        check_request(priority, client)
        now_s = loop.time()
        deadline = deadline_here(self._queue, self._name, now_s)
        size = self._size(item)
        request = QueuedRequest(
            _BatchItem[A, B](item, loop.create_future(), deadline),
            now_s,
            deadline_s=None if deadline is None else deadline.at_s,
            priority=priority,
            client=client,
            bucket=self._bucket_of(item),
            size=size,
            cost=self._batch.cost_of(size),
        )
        if (tracer := self._tracer) is not None:
            request.subject.trace = tracer.here()
        evicted = queues.admitted(self._queue, request, now_s)
        if evicted is not None:
            self._drop(evicted, DropReason.EVICTED, now_s)
        self._pump()
        return request

    def _bucket_of(self, item: A) -> Hashable:
        if self._bucket is None:
            return None
        return hashable("what bucket returns", self._bucket(item))

    def _size(self, item: A) -> int:
        """Return the bytes of an item, if they are limited."""
        most = self._batch.max_bytes
        if most is None:
            return 0
        size = self._size_of(item)
        check_count("the size of an item, as size_of returns it,", size)
        if size > most:
            raise UsageError(
                f"an item of {size} bytes is larger than a batch may be: {most} bytes "
                "(max_bytes)"
            )
        return size

    def _leave(self, request: QueuedRequest[_BatchItem[A, B]]) -> None:
        member = request.subject
        self._queue.remove(request)
        if member.answer.cancelled():  # else it ended in the same loop iteration
            self._ends.left += 1
        if member.batch is not None:
            member.batch.cancel_if_unwanted()
        if member.answer.done() and not member.answer.cancelled():
            member.answer.exception()  # mark it as read

    def _drop(
        self,
        request: QueuedRequest[_BatchItem[A, B]],
        reason: DropReason,
        now_s: float,
    ) -> None:
        """Tell a request that waited why it will not run."""
        member = request.subject
        error = queues.dropped(
            reason,
            deadline=member.deadline,
            name=self._name,
            age_s=now_s - request.came_s,
            retry_after_s=self._queue.rate.drain_s(self.waiting, now_s),
        )
        member.fail(error)

    # --- batches ---------------------------------------------------------------------

    def _pump(self, due_s: float = 0.0) -> None:
        """Drop and start what is due; set the timer for what is due next."""
        assert self._loop is not None
        now_s = max(self._loop.time(), due_s)
        for request, reason in self._queue.drop_due(now_s):
            self._drop(request, reason, now_s)
        while batch := self._batches.next_batch(now_s, is_closing=self._is_closing):
            self._start([request.subject for request in batch], now_s)
        self._timer.set(self._batches.wakes_at_s(), self._context)

    def _start(self, members: Sequence[_BatchItem[A, B]], now_s: float) -> None:
        assert self._loop is not None
        batch = _Batch(members)
        for member in members:
            member.batch = batch
        # In a separate context: the batch must not inherit the deadline or autograd
        # context of the request that completes it.
        task = self._loop.create_task(self._run(batch), context=self._context.copy())
        batch.task = task
        self._running[task] = batch
        self._queue.rate.begin(batch, now_s)
        task.add_done_callback(partial(self._on_ended, batch), context=self._context)

    async def _run(self, batch: _Batch[A, B]) -> None:
        deadline_var.set(_latest(batch.members))
        try:
            with self._shown(batch.members):
                answers = checked_answers(
                    self._whose,
                    await self._call([member.item for member in batch.members]),
                    len(batch.members),
                    "items",
                )
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001  (raised in the callers)
            self._fail(batch.members, settable(error))
        else:
            batch.is_typical = True
            self._answer(batch.members, answers)

    async def _call(self, items: list[A]) -> Any:
        answering = self._function(items)
        if not inspect.isawaitable(answering):
            raise UsageError(
                f"{self._whose} must be a coroutine function (async def), not one that"
                f" returns an object of type {type(answering).__name__}"
            )
        return await alone(answering)

    def _answer(
        self,
        members: Sequence[_BatchItem[A, B]],
        answers: Sequence[B | BaseException],
    ) -> None:
        for member, answer in zip(members, answers, strict=True):
            if member.answer.done():
                continue
            if isinstance(answer, BaseException):
                self._fail([member], settable(answer))
            else:
                self._ends.answered += 1
                member.answer.set_result(answer)

    def _fail(self, members: Sequence[_BatchItem[A, B]], error: BaseException) -> None:
        """Raise an error in the callers that have not been answered."""
        for member in members:
            if not member.answer.done():
                self._ends.failed += 1
                member.fail(error)

    @property
    def _tracer(self) -> CallTracer | None:
        """The tracer of the worker; None: its calls are not traced."""
        return tracer_in(self._context)

    def _shown(
        self, members: Sequence[_BatchItem[A, B]]
    ) -> AbstractContextManager[None]:
        """Return a context in which a batch runs, and is shown in traces."""
        tracer = self._tracer
        if tracer is None:
            return nullcontext()
        return tracer.batch(
            name_of(self._function), [member.trace for member in members]
        )

    def _on_ended(self, batch: _Batch[A, B], task: asyncio.Task[None]) -> None:
        assert self._loop is not None
        del self._running[task]
        if batch.is_typical:
            self._queue.rate.end(batch, len(batch.members), self._loop.time())
        else:
            self._queue.rate.drop(batch)
        cancelled = RejectedError("the batch was cancelled", outcome=Outcome.UNKNOWN)
        self._fail(batch.members, cancelled)
        self._pump()

    async def _abort(self) -> None:
        """End all remaining requests and batches, and wait for the batches."""
        for request in tuple(self._queue.waiting):
            self._queue.remove(request)
            self._fail([request.subject], queues.closed("batcher"))
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)
        self._timer.set(None, self._context)


def _latest(members: Sequence[_BatchItem[Any, Any]]) -> Deadline | None:
    """Return the latest deadline of some requests; None if one has no limit."""
    limits = [member.deadline for member in members if member.deadline is not None]
    if len(limits) < len(members):
        return None
    return max(limits, key=lambda limit: limit.at_s)  # they may be of several classes
